"""Whether the vLLM that is installed has the interfaces that the plugin was written for, and its log."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fxsplit_encoder.protocol import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphPathConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
    SupportsEncoderCudaGraph,
)

MEMBERS: Mapping[str, tuple[str, ...]] = {
    "capture": ("graph_pool",),
    "clear": (),
    "execute": ("mm_kwargs",),
    "get_cumulative_stats": (),
    "get_num_graphs_to_capture": (),
    "is_captured": (),
    "supports_modality": ("modality",),
}
"""Every public method of vLLM's manager, and its parameters."""

PROTOCOL: Mapping[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(method).parameters)[1:]
    for name, method in vars(SupportsEncoderCudaGraph).items()
    if callable(method) and not name.startswith("_")
}
"""What models implement, and its parameters."""

EXCHANGED = (
    EncoderItemSpec,
    EncoderCudaGraphConfig,
    EncoderCudaGraphPathConfig,
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphReplayBuffers,
)
"""What models and managers exchange, in this library's classes, whose names and fields are vLLM's."""

ATTENTION: Mapping[str, tuple[str, ...]] = {
    "__init__": ("num_heads", "head_size", "scale", "num_kv_heads", "prefix"),
    "forward_native": ("query", "key", "value", "cu_seqlens", "max_seqlen", "sequence_lengths"),
}
ROTARY: Mapping[str, tuple[str, ...]] = {
    "forward_static": ("x", "cos", "sin", "is_neox_style", "enable_fp32_compute"),
    "forward_cuda": ("x", "cos", "sin"),
}


def manager_problem(manager: type, protocol: type, definitions: Any) -> str | None:
    """What of vLLM's manager, of its `SupportsEncoderCudaGraph` and of the module of what they exchange is
    not as it was recorded; None: nothing.
    """
    public = {name for name, value in vars(manager).items() if callable(value) and name[0] != "_"}
    if public != set(MEMBERS):
        return f"its manager has the methods {', '.join(sorted(public))}"
    called = {"__init__": ("vllm_config", "device", "dtype", "model"), **MEMBERS}
    for owner, recorded in ((manager, called), (protocol, PROTOCOL)):
        if (problem := member_problem(owner, recorded)) is not None:
            return problem
    for own in EXCHANGED:
        kind = getattr(definitions, own.__name__, None)
        fields = [field.name for field in dataclasses.fields(kind)] if kind is not None else []
        if fields != [field.name for field in dataclasses.fields(own)]:
            return f"{own.__name__} has the fields {', '.join(fields)}"
    return None


def member_problem(owner: type, recorded: Mapping[str, Sequence[str]]) -> str | None:
    """Which method of a class of vLLM is not as it was recorded; None: none."""
    for name, names in recorded.items():
        if (problem := _parameter_problem(getattr(owner, name, None), names)) is not None:
            return f"{owner.__name__}.{name} {problem}"
    return None


def _parameter_problem(method: Callable[..., Any] | None, names: Sequence[str]) -> str | None:
    """Why a method cannot be called with, or called as one of, these parameters; more may have defaults."""
    if method is None:
        return "is missing"
    parameters = [
        parameter for parameter in inspect.signature(method).parameters.values() if parameter.name != "self"
    ]
    first = tuple(parameter.name for parameter in parameters[: len(names)])
    needed = [each.name for each in parameters[len(names) :] if each.default is inspect.Parameter.empty]
    if first != tuple(names) or needed:
        return f"takes ({', '.join(parameter.name for parameter in parameters)})"
    return None


# Below vLLM's logger, so that its settings hold and its process's name is in front.
logger = logging.getLogger("vllm.fxsplit_encoder")


@functools.lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    """Warns of something, once in this process: managers are made more than once."""
    logger.warning("%s", message)
