"""The command line: one thin file a command, over the public API."""
