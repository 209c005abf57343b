"""Drafters that run forwards of a model: a smaller one, the target's first layers, or the target itself."""
