"""Measures of the package's own order: its size, its imports, its call stacks and its reach into PyTorch."""
