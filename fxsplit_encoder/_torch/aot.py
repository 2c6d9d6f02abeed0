"""AOT and fake tensors: from a module to its ATen graph. Importing this loads neither AOT nor Dynamo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import fx, nn
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["detect_fake_mode", "make_fx", "unset_fake_temporarily"]


def to_aten(
    module: nn.Module,
    example_inputs: Sequence[Any],
    compile_graph: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Calls `compile_graph` with the ATen graph of a module, without gradients; returns its result wrapped in
    the aliases and writes to inputs that AOT took out, which `torch.export` does not.
    """
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=compile_graph, inference_compiler=compile_graph)
    return backend(module, example_inputs)  # type: ignore[arg-type]


def static_inputs() -> Sequence[int]:
    """Returns the positions of parameters and buffers among the inputs of AOT's graph."""
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return [] if metadata is None else metadata.static_input_indices


def boxed(function: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """Marks a function that empties its list of arguments, so that they are freed before it ends."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def tracing_context(fake_mode: Any) -> contextlib.AbstractContextManager[object]:
    """Returns a tracing context of its own: AOT and Inductor write to that of the whole graph."""
    return tracing(TracingContext(fake_mode))


def fake_mode_of(values: Iterable[Any]) -> Any:
    """Returns the fake mode of the first traced tensor, or None."""
    return next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)
