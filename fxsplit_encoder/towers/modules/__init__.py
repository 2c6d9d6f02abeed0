"""Vision towers that transformers lacks: modules of our own, with the names of published checkpoints."""
