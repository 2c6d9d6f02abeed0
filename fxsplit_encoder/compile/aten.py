"""From a module on tensors to its ATen inference graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd


def to_aten(
    module: nn.Module,
    example_inputs: Sequence[Any],
    compile_graph: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Calls `compile_graph` with the ATen graph of a module, without gradients; what that returns is wrapped
    in what AOT took out of the graph: aliases, and writes to inputs.

    Args:
        module: a forward from tensors and numbers to a tuple; its weights, if any, become inputs.
        example_inputs: traced ones where a trace is under way.
    """
    backend = aot_autograd(fw_compiler=compile_graph, inference_compiler=compile_graph)
    return backend(module, example_inputs)  # type: ignore[arg-type]
