"""Records the interfaces of the vLLM that is installed, for the tests that run without it.

    python -m tests.vllm.record            writes tests/integrations/vllm/recorded/VERSION.json

The parameters of methods and the names of fields, of which `fake_vllm.py` there makes a package that looks
like vLLM.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parents[1] / "integrations" / "vllm" / "recorded"

CLASSES = {
    "vllm.v1.worker.encoder_cudagraph": ("EncoderCudaGraphManager",),
    "vllm.model_executor.models.interfaces": ("SupportsEncoderCudaGraph",),
    "vllm.model_executor.layers.attention.mm_encoder_attention": ("MMEncoderAttention",),
    "vllm.model_executor.custom_op": ("CustomOp",),
    "vllm.model_executor.layers.rotary_embedding.common": ("ApplyRotaryEmb",),
}
"""Their methods are recorded; of the attention and its base those that the plugin overrides or calls."""

ONLY = {
    "MMEncoderAttention": ("__init__", "forward_native", "forward_cuda", "forward_cpu"),
    "CustomOp": ("register_oot", "forward"),
    "ApplyRotaryEmb": ("forward_static", "forward_native", "forward_cuda"),
}

FIELDS = {
    "vllm.v1.worker.encoder_cudagraph_defs": (
        *("EncoderItemSpec", "EncoderCudaGraphConfig", "EncoderCudaGraphPathConfig"),
        *("EncoderCudaGraphCaptureInputs", "EncoderCudaGraphReplayBuffers"),
    )
}
"""Dataclasses."""

SETTINGS = {
    "vllm.config.CompilationConfig": (
        *("cudagraph_mm_encoder", "encoder_cudagraph_token_budgets"),
        *("encoder_cudagraph_max_vision_items_per_batch", "encoder_cudagraph_max_frames_per_batch"),
    ),
    "vllm.config.MultiModalConfig": ("mm_encoder_tp_mode",),
    "vllm.config.ParallelConfig": ("tensor_parallel_size",),
    "vllm.config.LoRAConfig": ("enable_tower_connector_lora",),
}
"""Settings that the plugin reads, with their defaults."""

ATTRIBUTES = {"vllm.v1.worker.encoder_cudagraph": ("EncoderCudaGraphManager",)}
"""Classes of which the public attributes are recorded that their constructors set."""


def record() -> dict[str, Any]:
    import vllm

    classes = {
        f"{module}.{name}": _methods(getattr(importlib.import_module(module), name))
        for module, names in CLASSES.items()
        for name in names
    }
    fields = {
        f"{module}.{name}": [
            field.name for field in dataclasses.fields(getattr(importlib.import_module(module), name))
        ]
        for module, names in FIELDS.items()
        for name in names
    }
    attributes = {
        f"{module}.{name}": _attributes(getattr(importlib.import_module(module), name))
        for module, names in ATTRIBUTES.items()
        for name in names
    }
    return {
        "version": vllm.__version__,
        "classes": classes,
        "fields": fields,
        "settings": {name: _defaults(name, names) for name, names in SETTINGS.items()},
        "attributes": attributes,
    }


def _methods(kind: type) -> dict[str, str]:
    only = ONLY.get(kind.__name__)
    return {
        name: _signature(getattr(value, "__func__", value))
        for name, value in vars(kind).items()
        if (name in only if only else (name == "__init__" or name[0] != "_"))
        and (callable(value) or isinstance(value, classmethod))
    }


def _attributes(kind: type) -> list[str]:
    """The public names that its constructor assigns to its object."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind.__init__)))  # type: ignore[misc]
    stored = (
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )
    return sorted({name for name in stored if name[0] != "_"})


def _signature(function: Any) -> str:
    """As it is written, without annotations, and with None for every default."""
    empty = inspect.Parameter.empty
    parameters = [
        each.replace(annotation=empty, default=empty if each.default is empty else None)
        for each in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(parameters))


def _defaults(name: str, names: tuple[str, ...]) -> dict[str, Any]:
    module, _, kind = name.rpartition(".")
    fields = {
        field.name: field for field in dataclasses.fields(getattr(importlib.import_module(module), kind))
    }
    return {each: _default(fields[each]) for each in names}


def _default(field: Any) -> Any:
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    return getattr(default, "default", default)  # of a pydantic field


def main() -> None:
    recorded = record()
    RECORDED.mkdir(exist_ok=True)
    path = RECORDED / f"{recorded['version']}.json"
    path.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
