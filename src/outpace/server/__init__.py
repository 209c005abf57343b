"""The OpenAI-compatible server (docs/serving.md). Needs ``outpace[serve]``."""
