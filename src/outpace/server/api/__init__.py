"""One file a feature: its request, its answer, its route."""
