"""A fake vLLM for every test here, and a plugin that has warned of nothing yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fxsplit_encoder.integrations.vllm import compatibility
from fxsplit_encoder.integrations.vllm.settings import VARIABLE

from .fake_vllm import VERSIONS, FakeVllm


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    """The latest recorded version."""
    monkeypatch.delenv(VARIABLE, raising=False)
    compatibility.warn_once.cache_clear()
    yield FakeVllm(VERSIONS[-1], monkeypatch)
    compatibility.warn_once.cache_clear()


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows while the test runs."""
    messages: list[str] = []
    monkeypatch.setattr(compatibility.logger, "warning", lambda text, *given: messages.append(text % given))
    return messages
