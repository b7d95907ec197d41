"""Models of Hugging Face's `transformers`: built from a config or a local folder, split by the plans they declare."""
