"""Dynamo's interface of custom vision encoders: as recorded from ai-dynamo 1.6.1, and as it is installed.

The recording is of names, signatures and defaults alone. The installed package is imported module by module,
past its `__init__` files, which need vLLM and a compiled runtime; the two types that it takes from vLLM, both
dictionaries, are stood in for.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

OURS = "fxsplit_encoder.service.dynamo"
UTILITIES = "dynamo.vllm.multimodal_utils"
PACKAGE = f"{UTILITIES}.custom_encoder"


@dataclass(frozen=True)
class Preprocessed:
    item: Any
    cost: int = 1


@dataclass(frozen=True)
class Qwen3VLImageEncoding:
    embeddings: Any
    grid_thw: tuple[int, int, int]


class VisionEncoderBackend(ABC):
    max_batch_cost: int | None = None
    buckets: Any = None
    preprocess_concurrency: int = 0

    @abstractmethod
    def build(self, model_id: str) -> None: ...

    def preprocess(self, raw: Any) -> Any:
        return Preprocessed(item=raw)

    @abstractmethod
    def forward_batch(self, items: Any, target_bucket: int | None = None) -> Any: ...

    def close(self) -> None:  # noqa: B027 - as Dynamo's: optional
        pass


RECORDED = (Preprocessed, Qwen3VLImageEncoding, VisionEncoderBackend)


def installed_at() -> Path | None:
    if importlib.util.find_spec("dynamo") is None:
        return None
    spec = importlib.util.find_spec("dynamo.vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "multimodal_utils" / "custom_encoder"


@contextmanager
def recorded_interface() -> Iterator[Any]:
    """Our module over the recording."""
    with _modules_of_their_own():
        for name in ("dynamo", "dynamo.vllm", UTILITIES, PACKAGE):
            sys.modules[name] = ModuleType(name)
        vars(sys.modules[PACKAGE]).update({each.__name__: each for each in RECORDED})
        yield importlib.import_module(OURS)


@contextmanager
def installed_interface(folder: Path) -> Iterator[SimpleNamespace]:
    """Our module over the package, and what the package drives it by."""
    with _modules_of_their_own():
        vllm_inputs = ModuleType("vllm.inputs")
        vars(vllm_inputs).update(EmbedsPrompt=dict, TokensPrompt=dict)
        sys.modules.update({"vllm": ModuleType("vllm"), "vllm.inputs": vllm_inputs})
        for name, path in ((UTILITIES, folder.parent), (PACKAGE, folder)):
            package = ModuleType(name)
            package.__path__ = [str(path)]
            sys.modules[name] = package
        backend, driver, qwen, factory = (
            importlib.import_module(f"{PACKAGE}.{name}")
            for name in ("backend.base", "async_encoder", "adapter.qwen3_vl", "adapter.factory")
        )
        held = {"Preprocessed": backend.Preprocessed, "VisionEncoderBackend": backend.VisionEncoderBackend}
        vars(sys.modules[PACKAGE]).update(held, Qwen3VLImageEncoding=qwen.Qwen3VLImageEncoding)
        ours = importlib.import_module(OURS)
        yield SimpleNamespace(
            ours=ours,
            Driver=driver.AsyncVisionEncoder,
            make_adapter=factory.create_custom_encoder_adapter,
            classes=(backend.Preprocessed, qwen.Qwen3VLImageEncoding, backend.VisionEncoderBackend),
        )


@contextmanager
def _modules_of_their_own() -> Iterator[None]:
    def ours_and_theirs() -> dict[str, ModuleType]:
        roots = {"dynamo", "vllm"}
        return {n: m for n, m in sys.modules.items() if n.split(".")[0] in roots or n == OURS}

    before = ours_and_theirs()
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in ours_and_theirs():
            del sys.modules[name]
        sys.modules.update(before)
