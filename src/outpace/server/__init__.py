"""The OpenAI-compatible server: its own floor, above the engine."""
