"""A package that looks like vLLM: its recorded interfaces, whose methods note that they were called.

`python -m tests.vllm.record` refreshes what is recorded.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

RECORDED = Path(__file__).parent / "recorded"
VERSIONS = sorted(path.stem for path in RECORDED.glob("*.json"))

MANAGER = "vllm.v1.worker.encoder_cudagraph"
INTERFACE = "vllm.v1.worker.gpu.model_states.interface"
ATTENTION = "vllm.model_executor.layers.attention.mm_encoder_attention"
CUSTOM_OP = "vllm.model_executor.custom_op"
NAME = "EncoderCudaGraphManager"


class FakeVllm:
    """The modules of one recorded version, as long as a test runs."""

    def __init__(self, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded = json.loads((RECORDED / f"{version}.json").read_text(encoding="utf-8"))
        self._monkeypatch = monkeypatch
        self._module("vllm").__version__ = version  # type: ignore[attr-defined]
        for path, methods in self.recorded["classes"].items():
            self._add(path, _recording_class(path, methods, self.recorded["attributes"].get(path, ())))
        for path, fields in self.recorded["fields"].items():
            self._add(path, dataclasses.make_dataclass(path.rpartition(".")[2], fields))
        custom_op = self.module(CUSTOM_OP)
        custom_op.op_registry_oot = {}
        custom_op.CustomOp.register_oot = classmethod(_registering(custom_op.op_registry_oot))
        self.module(ATTENTION).MMEncoderAttention = FakeAttention
        self._add("vllm.platforms.current_platform", SimpleNamespace(device_type="cpu"))

    def module(self, name: str) -> Any:
        return sys.modules[name]

    @property
    def manager(self) -> Any:
        """What the runner of the first generation imports when it makes a manager."""
        return self.module(MANAGER).EncoderCudaGraphManager

    def import_interface(self) -> Any:
        """What the second generation's module does when it is imported."""
        return self._add(f"{INTERFACE}.{NAME}", self.manager)

    def config(self, **settings: Any) -> Any:
        """vLLM's configuration with its defaults, changed by what is given."""
        defaults = self.recorded["settings"]
        parts = {name.rpartition(".")[2]: SimpleNamespace(**fields) for name, fields in defaults.items()}
        multimodal = parts["MultiModalConfig"]
        multimodal.get_limit_per_prompt = lambda modality: settings.get("video_limit", 999)
        parts["LoRAConfig"].enable_tower_connector_lora = True
        for part in parts.values():
            for name in vars(part):
                setattr(part, name, settings.get(name, getattr(part, name)))
        return SimpleNamespace(
            compilation_config=parts["CompilationConfig"],
            model_config=SimpleNamespace(multimodal_config=multimodal),
            parallel_config=parts["ParallelConfig"],
            lora_config=parts["LoRAConfig"] if settings.get("tower_lora") else None,
        )

    def _add(self, path: str, value: Any) -> Any:
        name, _, attribute = path.rpartition(".")
        module = self._module(name)
        setattr(module, attribute, value)
        return module

    def _module(self, name: str) -> ModuleType:
        if name not in sys.modules or not hasattr(sys.modules[name], "is_fake"):
            module = ModuleType(name)
            module.is_fake = True  # type: ignore[attr-defined]
            module.__path__ = []
            self._monkeypatch.setitem(sys.modules, name, module)
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(self._module(parent), last, module)
        return sys.modules[name]


class FakeAttention(nn.Module):
    """vLLM's attention layer as far as its subclass reads it; its own forward says that it was called."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.num_heads, self.head_size = num_heads, head_size
        self.scale = head_size**-0.5 if scale is None else scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.attn_backend = SimpleNamespace(name="FLASH_ATTN")
        self.fp8_enabled = False

    def forward(self, *args: Any) -> Any:
        return "vLLM's own"

    def forward_native(
        self,
        query: Any,
        key: Any,
        value: Any,
        cu_seqlens: Any = None,
        max_seqlen: Any = None,
        sequence_lengths: Any = None,
    ) -> Any:
        raise NotImplementedError


def _recording_class(path: str, methods: dict[str, str], attributes: Iterable[str]) -> type:
    """With what its constructor sets, to 0; and `token_budgets`."""
    module, _, name = path.rpartition(".")
    members: dict[str, Any] = {}
    for method, signature in methods.items():
        exec(f"def {method}{signature}: return _note({method!r}, locals())", {"_note": _note}, members)
    of_objects = {**dict.fromkeys(attributes, 0), "token_budgets": [1, 2]}
    return type(name, (), {**members, "calls": (), "of_objects": of_objects, "__module__": module})


def _note(method: str, given: dict[str, Any]) -> Any:
    self = given.pop("self", None)
    if method == "__init__":
        vars(self).update(self.of_objects)
    self.calls = (*self.calls, (method, given))
    return getattr(self, f"result_of_{method}", None)


def _registering(registry: dict[str, Any]) -> Any:
    def register_oot(cls: Any, _decorated_op_cls: Any = None, name: str | None = None) -> Any:
        assert name is not None and name not in registry
        return lambda op: registry.setdefault(name, op)

    return register_oot
