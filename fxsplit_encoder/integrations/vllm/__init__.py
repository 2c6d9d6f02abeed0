"""vLLM's encoder CUDA graphs, made by this library: a plugin that vLLM loads by itself (docs/vllm.md).

vLLM is imported by the functions that need it, never by importing this package.
"""
