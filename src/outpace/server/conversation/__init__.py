"""Conversations as a template takes them, and answers taken apart while they are written."""
