"""Model files: GGUF and safetensors."""
