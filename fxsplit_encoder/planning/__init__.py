"""Which items share a batch and how each batch runs, decided from sizes and costs alone. Needs no torch."""
