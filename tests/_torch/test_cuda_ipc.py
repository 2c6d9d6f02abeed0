"""What of CUDA's shared memory needs no CUDA. The rest is in `tests/gpu/test_encoder_process.py`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fxsplit_encoder._torch.cuda_ipc import forget


def test_the_counter_of_a_killed_process_is_removed() -> None:
    path = Path(f"/dev/shm/torch_{os.getpid()}_forget_test")
    path.touch()
    values = [b"handle", 4096, 0, f"/{path.name}".encode(), 0, b"event", True]
    forget(values)
    assert not path.exists()
    forget(values)


@pytest.mark.parametrize("name", [b"/other", b"/torch_/../x", b"", 7, b"torch_1"], ids=str)
def test_nothing_else_is_removed(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "unlink", lambda *arguments, **options: pytest.fail("removed"))
    forget([b"handle", 4096, 0, name, 0, b"event", True])
    forget([b"handle"])
