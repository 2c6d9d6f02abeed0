"""FX only: a Dynamo graph becomes an ATen graph, is split at attention, and becomes a compiled `Program`.

Knows nothing of CUDA graphs or models. Import modules one by one: those that compile load Dynamo and sympy,
which takes seconds.
"""
