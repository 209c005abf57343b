"""Between text and token ids: tokenizers, chat templates, answers as they come, grammars."""
