"""Compile a Dynamo graph to a `Program`: trace it to ATen, split it at attention, compile the pieces.

Knows nothing of CUDA graphs or models. Import modules one by one: those that compile load Dynamo and sympy,
which takes seconds.
"""
