"""Two names that every module which Inductor generates imports, without the parts of Inductor that define
them: its lowerings and code generators, which only compiling needs and which take longer to import than all
pieces of a tower to load.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["SAME_IN_TORCH", "align", "extern_kernels", "import_lightly"]

SAME_IN_TORCH = frozenset(("addmm", "baddbmm", "bmm", "convolution", "mm"))
"""Kernels that Inductor takes from torch under the same name, as a test checks."""

_LIGHT = {
    f"from torch._inductor.{module} import {name}": f"from {__name__} import {own}"
    for module, name, own in (
        ("codegen.memory_planning", "_align as align", "align"),
        ("select_algorithm", "extern_kernels", "extern_kernels"),
    )
}


class _ExternKernels:
    """What generated code calls that is no kernel of its own; of Inductor's where torch has no such name."""

    def __getattr__(self, name: str) -> Any:
        if name in SAME_IN_TORCH:
            kernel = getattr(torch, name)
        else:
            from torch._inductor.select_algorithm import extern_kernels as all_of_them

            kernel = getattr(all_of_them, name)
        setattr(self, name, kernel)  # the next call finds it without this one
        return kernel


extern_kernels = _ExternKernels()


def align(num_bytes: int) -> int:
    """As Inductor's own, which plans of memory call, and no other code."""
    from torch._inductor.codegen import memory_planning

    own: Any = memory_planning
    return int(own._align(num_bytes))


def import_lightly(source: str) -> str:
    """A generated module that has both names from here, line for line as it was; of another form it stays."""
    lines = source.split("\n")
    return "\n".join(_LIGHT.get(line.rstrip(), line) for line in lines)
