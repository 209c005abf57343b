"""One thin file a route: what it takes, what it answers."""
