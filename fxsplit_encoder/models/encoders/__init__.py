"""Vision encoders that transformers lacks, with the parameter names of published checkpoints."""
