"""Does a server say the same, whatever goes on around a request? ``python -m benchmarks.invariance``."""
