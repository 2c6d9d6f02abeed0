"""Tensors from one process to another of the same host, through shared memory."""
