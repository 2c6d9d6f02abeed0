"""What a generated module of Inductor's gets in place of the names that it imports."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch._inductor import select_algorithm
from torch._inductor.codegen import memory_planning

from fxsplit_encoder._torch.inductor_names import SAME_IN_TORCH, align, extern_kernels, import_lightly

HEADER = """
from torch._inductor.codegen.memory_planning import _align as align
from torch import device, empty_strided
from torch._inductor.select_algorithm import extern_kernels
"""


@pytest.mark.parametrize("name", [*sorted(SAME_IN_TORCH), "bias_addmm"])
def test_a_kernel_is_inductors(name: str) -> None:
    assert getattr(extern_kernels, name) is getattr(select_algorithm.extern_kernels, name)


def test_there_is_no_kernel_that_inductor_has_not() -> None:
    with pytest.raises(AttributeError, match="of_nobody"):
        _ = extern_kernels.of_nobody


def test_sizes_are_aligned_as_inductor_does() -> None:
    sizes = (0, 1, 63, 64, 65)
    assert [align(size) for size in sizes] == [memory_planning._align(size) for size in sizes]  # type: ignore[attr-defined]


def test_a_module_keeps_its_lines_and_imports_nothing_that_compiles() -> None:
    light = import_lightly(HEADER)
    assert len(light.split("\n")) == len(HEADER.split("\n"))
    code = f"{light}\nimport sys\nextern_kernels.addmm\nprint('torch._inductor.lowering' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_a_module_of_another_form_stays() -> None:
    other = "from torch._inductor.select_algorithm import extern_kernels, another"
    assert import_lightly(other) == other
