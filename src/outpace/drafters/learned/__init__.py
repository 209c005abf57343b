"""Drafters that were trained beside their target: EAGLE-3, block-parallel, Medusa."""
