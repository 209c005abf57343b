"""Between text and token ids: tokenizers, chat templates, bytes."""
