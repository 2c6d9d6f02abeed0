"""Decide by sizes and costs which items share a batch and how each batch runs. Imports no torch."""
