"""Requests in, tokens out: admission, the step, sequences, results."""
