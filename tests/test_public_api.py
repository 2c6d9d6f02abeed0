import subprocess
import sys

import pytest

import fxsplit_encoder as fx


def test_the_public_names_are_sorted_and_described() -> None:
    """`test_documents.py` holds them to those of the reference."""
    assert fx.__all__ == sorted(fx.__all__)
    assert all(getattr(fx, name).__doc__ for name in fx.__all__)


def test_names_are_listed_and_an_unknown_one_is_named() -> None:
    assert set(fx.__all__) <= set(dir(fx))
    with pytest.raises(AttributeError, match="module 'fxsplit_encoder' has no attribute 'warm_up'"):
        _ = fx.warm_up


HEAVY = ("torch._dynamo", "torch._inductor", "sympy", "transformers", "torch.distributed.tensor", "triton")
"""They take seconds to import; a manager needs them when it compiles."""

SCRIPT = f"""
import sys, fxsplit_encoder as fx, fxsplit_encoder.cli.main
print([name for name in ('torch', 'transformers') if name in sys.modules])
fx.EncoderConfig
print('torch' in sys.modules)
import torch
before = set(sys.modules)
fx.EncoderCudaGraphManager, fx.BreakableCUDAGraphWrapper, fx.GraphPool, fx.EncoderConfig()
print(sorted(set({HEAVY}) & (set(sys.modules) - before)))
from fxsplit_encoder.compile.trace import trace_forward
print('torch._dynamo' in sys.modules)
from fxsplit_encoder import *
print(all(name in globals() for name in fx.__all__))
"""


def test_torch_and_what_compiles_are_imported_when_they_are_used() -> None:
    finished = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines() == ["[]", "False", "[]", "True", "True"]
