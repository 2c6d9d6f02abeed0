"""What a generated module of Inductor's gets in place of the names that it imports, and where it lies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._inductor import select_algorithm
from torch._inductor.codegen import memory_planning

from fxsplit_encoder._torch import inductor_cache
from fxsplit_encoder._torch.inductor_cache import SAME_IN_TORCH, align, extern_kernels, import_lightly

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


def bundle_of(*sources: str | None) -> SimpleNamespace:
    kernels = [SimpleNamespace(filename=source) for source in sources]
    return SimpleNamespace(static_autotuners=[SimpleNamespace(kernel=kernel) for kernel in kernels])


def test_sources_are_named_by_the_cache_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    bundle = bundle_of("/tmp/torchinductor_other/3u/c3un3uyed5.py", str(tmp_path / "ab" / "cab.py"), None)
    inductor_cache.name_sources(bundle)
    assert [each.kernel.filename for each in bundle.static_autotuners] == [
        str(tmp_path / "3u" / "c3un3uyed5.py"),
        str(tmp_path / "ab" / "cab.py"),
        None,
    ]
