"""Tests of the package, laid out as it is."""

import os

# Inductor asks the C++ compiler what vectors the CPU knows, which takes seconds with an empty cache and tells
# nothing of the graphs that it is given here. Set before torch is imported; processes of tests inherit it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# A cache of what operations on fake tensors return; it makes small traces 5 % slower.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
