"""Capture callables over static buffers as CUDA graphs, and replay them. Imports no models."""
