"""Which kernels of a graph's linear layers are worth compiling before they are called."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from fxsplit_encoder.attention.kernels import ahead
from fxsplit_encoder.kernels import AUTO
from fxsplit_encoder.products.choice import current_product_chooser
from fxsplit_encoder.products.kernels.quack import Quack, has_fused_activations
from fxsplit_encoder.products.kernels.quack_files import name_directory
from fxsplit_encoder.products.op import linear


def compile_ahead(nodes: Iterable[fx.Node], device: torch.device) -> None:
    """Begins to compile the kernels that will be compared for the layers with an activation among some nodes;
    none where a setting chooses, or where times of such layers are known and with them the kernels.
    """
    chooser = current_product_chooser()
    if device.type != "cuda" or any(pin.kernel != AUTO for pin in chooser.pins):
        return
    if not has_fused_activations(torch.cuda.get_device_capability(device)):
        return
    table = chooser.measurements.table(device)
    known = {(shape.activation, shape.dtype) for shape, found in table.items() if found.microseconds}
    for activation, dtype in _activations_of(nodes):
        if (activation, dtype) not in known:
            name_directory()
            names = (k.name for k in chooser.measurements.kernels if _is_compiled_for(k, activation))
            ahead.start(names, activation, dtype, device, apart=False)


def _activations_of(nodes: Iterable[fx.Node]) -> list[tuple[str, torch.dtype]]:
    """Those of layers with a bias, without which there is a variant of its own."""
    found: dict[tuple[str, torch.dtype], None] = {}
    for node in nodes:
        if node.target is linear and node.args[2] is not None and node.args[3] != "none":
            rows: Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
            found[str(node.args[3]), rows.dtype] = None
    return list(found)


def _is_compiled_for(kernel: object, activation: str) -> bool:
    return isinstance(kernel, Quack) and kernel.applies(activation)
