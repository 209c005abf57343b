"""Models: what runs a forward pass, the KV cache it owns, and how models and tokenizers are found and read."""
