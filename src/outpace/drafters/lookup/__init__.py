"""Drafters that look tokens up: in the sequence, in its history, in a datastore."""
