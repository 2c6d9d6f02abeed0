"""Which kernels of a graph's attention are worth compiling before they are called."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from fxsplit_encoder.attention.choice import KernelChooser, current_chooser
from fxsplit_encoder.attention.kernels import ahead
from fxsplit_encoder.attention.kernels.ahead import dismiss
from fxsplit_encoder.attention.kernels.flash_attn import FlashAttention4
from fxsplit_encoder.attention.kernels.whole_waves import WholeWaves
from fxsplit_encoder.attention.op import dense_attention, varlen_attention
from fxsplit_encoder.kernels import AUTO

__all__ = ["compile_ahead", "dismiss", "heads_of", "warm_up"]

Heads = tuple[torch.dtype, int]
"""Their dtype and width."""


def warm_up(device: torch.device) -> None:
    """Starts processes for `compile_ahead` where nothing was measured on a device yet; `dismiss` ends those
    that were not needed.
    """
    chooser = current_chooser()
    if not (_is_settled(chooser) or ahead.why_not(device) or chooser.measurements.table(device)):
        ahead.warm_up(len(_names(chooser, is_dense=False)) + 1, device)  # one for heads as the tower has them


def heads_of(nodes: Iterable[fx.Node]) -> dict[Heads, bool]:
    """The heads that attend among some nodes, and whether to a batch somewhere; without those of a width that
    varies.
    """
    found: dict[Heads, bool] = {}
    for node in nodes:
        if node.target in (varlen_attention, dense_attention):
            query: Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
            width = query.shape[-1]
            if isinstance(width, int):  # else a symbol
                heads = (query.dtype, width)
                found[heads] = found.get(heads, False) or node.target is dense_attention
    return found


def compile_ahead(nodes: Iterable[fx.Node], device: torch.device, *, eager: Iterable[Heads] = ()) -> None:
    """Begins to compile the kernels that will be compared for the attention among some nodes; none where a
    setting chooses, or where times of such heads are known and with them the kernels.

    Args:
        eager: heads of the tower's own forward, which is timed beside the graph: passes may have stored those
            of the graph wider.
    """
    chooser = current_chooser()
    if _is_settled(chooser) or ahead.why_not(device):
        return
    table = chooser.measurements.table(device)
    known = {(shape.dtype, shape.head_dim) for shape, found in table.items() if found.microseconds}
    captured = heads_of(nodes)
    wanted = {heads: _names(chooser, is_dense=is_dense) for heads, is_dense in captured.items()}
    for heads in eager:
        wanted.setdefault(heads, _names(chooser, is_dense=False, is_captured=False))
    for (dtype, head_dim), names in wanted.items():
        if (dtype, head_dim) not in known:
            ahead.start(names, head_dim, dtype, device)


def _is_settled(chooser: KernelChooser) -> bool:
    return chooser.invariant or any(pin.kernel != AUTO for pin in chooser.pins)


def _names(chooser: KernelChooser, *, is_dense: bool, is_captured: bool = True) -> list[str]:
    """Of the kernels that compile a variant of their own; those that cut at whole waves call two of these."""
    return [
        kernel.name
        for kernel in chooser.measurements.kernels
        if isinstance(kernel, FlashAttention4)
        and not isinstance(kernel, WholeWaves)
        and (is_dense or not kernel.needs_equal_segments)
        and (is_captured or not kernel.in_graphs_alone)
    ]
