"""The Transformers backend: any decoder-only AutoModelForCausalLM behind the Model seam."""
