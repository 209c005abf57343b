"""What the server reports: metrics, log lines, spans, traces of steps."""
