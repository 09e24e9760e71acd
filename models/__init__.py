"""Reference models, batch-level, made to be copied."""
