"""Outpace inside other systems."""
