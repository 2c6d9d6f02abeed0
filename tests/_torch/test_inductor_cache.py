"""Where kernels that were compiled in another process look for what was found of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fxsplit_encoder._torch import inductor_cache


def bundle_of(*sources: str | None) -> SimpleNamespace:
    kernels = [SimpleNamespace(filename=source) for source in sources]
    return SimpleNamespace(static_autotuners=[SimpleNamespace(kernel=kernel) for kernel in kernels])


def test_sources_are_named_by_the_cache_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    bundle = bundle_of("/tmp/torchinductor_other/3u/c3un3uyed5.py", str(tmp_path / "ab" / "cab.py"), None)
    inductor_cache._name_sources(bundle)
    assert [each.kernel.filename for each in bundle.static_autotuners] == [
        str(tmp_path / "3u" / "c3un3uyed5.py"),
        str(tmp_path / "ab" / "cab.py"),
        None,
    ]
