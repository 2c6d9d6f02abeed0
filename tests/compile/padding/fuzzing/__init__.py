"""Random graphs of ATen operations, and whether those that the proof accepts may be padded.

inputs      what enters a graph: its values for a token count, exact or followed by garbage
builder     a graph that grows call by call, traced with a symbolic token count
calls       every operation with a rule, and every pointwise one, with arguments drawn by its schema
kernels     what runs in place of operations whose results are not determined, or that need a device
comparison  the padded run next to the exact one, node by node
campaign    a graph around an operation, and what became of it
"""
