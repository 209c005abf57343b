"""Other servers' own tests, run against ``outpace serve``: ``scripts/peers``."""
