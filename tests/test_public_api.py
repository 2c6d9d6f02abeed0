import subprocess
import sys

import pytest

import fxsplit_encoder as fx


def test_the_public_names_are_sorted_and_described() -> None:
    """`test_documents.py` holds them to those of the reference."""
    assert fx.__all__ == sorted(fx.__all__)
    assert all(getattr(fx, name).__doc__ for name in fx.__all__)


def test_names_that_need_torch_are_listed_and_imported_when_they_are_used() -> None:
    assert set(fx.__all__) <= set(dir(fx))
    with pytest.raises(AttributeError, match="module 'fxsplit_encoder' has no attribute 'warm_up'"):
        _ = fx.warm_up
    script = (
        "import sys, fxsplit_encoder as fx, fxsplit_encoder.cli.main\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
        "from fxsplit_encoder import *\n"
        "print('torch' in sys.modules, all(name in globals() for name in fx.__all__))"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines() == ["[]", "True True"]


def test_what_captures_is_imported_without_what_compiles() -> None:
    """Dynamo, Inductor and sympy take seconds to import; a manager needs them when it compiles."""
    heavy = (
        "torch._dynamo",
        "torch._inductor",
        "sympy",
        "transformers",
        "torch.distributed.tensor",
        "triton",
    )
    script = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import fxsplit_encoder as fx\n"
        "fx.EncoderCudaGraphManager, fx.BreakableCUDAGraphWrapper, fx.GraphPool, fx.EncoderConfig()\n"
        f"print(sorted(set({heavy}) & (set(sys.modules) - before)))\n"
        "from fxsplit_encoder.compile.trace import trace_forward\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines() == ["[]", "True"]
