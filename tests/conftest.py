"""What all tests need."""

import signal

# A shell that starts tests in the background has them ignore Ctrl-C, and the processes that they start, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
