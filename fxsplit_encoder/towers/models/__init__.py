"""Vision towers that transformers does not have."""
