"""Choose the kernels of a graph's attention that are compiled before they are called."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, fx

from fxsplit_encoder.kernels import compile_jobs
from fxsplit_encoder.kernels.attention.chooser import KernelChooser, current_chooser
from fxsplit_encoder.kernels.attention.flash_attn import FlashAttention4, WholeWaves
from fxsplit_encoder.kernels.attention.op import dense_attention, traced, varlen_attention

# Their dtype and width.
Heads = tuple[torch.dtype, int]


def warm_up(device: torch.device) -> None:
    """Starts processes for `compile_ahead` if nothing was measured on the device."""
    chooser = _comparing(device)
    if chooser is not None and not chooser.measurements.table(device):
        # One more, for heads as the tower has them.
        compile_jobs.warm_up(len(_names(chooser)) + 1, device)


@contextlib.contextmanager
def compiling_as_traced(device: torch.device, stored_width: Callable[[int], int]) -> Iterator[None]:
    """Starts jobs of `compile_ahead` while attention is traced; `stored_width` maps a traced width of heads
    to that of the graph.
    """
    if (chooser := _comparing(device)) is None:
        yield
        return

    def meet(query: Tensor) -> None:
        dtype, width = query.dtype, query.shape[-1]
        if isinstance(width, int):  # else a symbol
            stored = stored_width(width)
            _start(chooser, (dtype, stored), _names(chooser), device)
            if stored != width:
                _start(chooser, (dtype, width), _names(chooser, is_captured=False), device)

    token = traced.set(meet)
    try:
        yield
    finally:
        traced.reset(token)


def heads_of(nodes: Iterable[fx.Node]) -> dict[Heads, bool]:
    """The heads of fixed width of the attention among some nodes, and whether one attends to a batch."""
    found: dict[Heads, bool] = {}
    for node in nodes:
        if node.target in (varlen_attention, dense_attention):
            query: Tensor = node.all_input_nodes[0].meta["val"]
            width = query.shape[-1]
            if isinstance(width, int):  # else a symbol
                heads = (query.dtype, width)
                found[heads] = found.get(heads, False) or node.target is dense_attention
    return found


def compile_ahead(nodes: Iterable[fx.Node], device: torch.device, *, eager: Iterable[Heads] = ()) -> None:
    """Starts to compile the kernels to compare for nodes, and for `eager` heads of the tower's forward."""
    if (chooser := _comparing(device)) is None:
        return
    for heads, is_dense in heads_of(nodes).items():
        _start(chooser, heads, _names(chooser, is_dense=is_dense), device)
    for heads in eager:
        _start(chooser, heads, _names(chooser, is_captured=False), device)


def _comparing(device: torch.device) -> KernelChooser | None:
    """Returns the chooser if it compares kernels that can be compiled ahead."""
    chooser = current_chooser()
    is_settled = chooser.invariant or chooser.pinned_names
    return chooser if compile_jobs.is_possible(device) and not is_settled else None


def _start(chooser: KernelChooser, heads: Heads, names: Iterable[str], device: torch.device) -> None:
    """Starts a job for each kernel, unless such heads were measured: then they are compiled."""
    table = chooser.measurements.table(device)
    if heads not in {(shape.dtype, shape.head_dim) for shape, found in table.items() if found.microseconds}:
        for name in names:
            compile_jobs.start([name], heads[1], heads[0], device)


def _names(chooser: KernelChooser, *, is_dense: bool = False, is_captured: bool = True) -> list[str]:
    # Those that cut at whole waves call two of the others.
    return [
        kernel.name
        for kernel in chooser.measurements.kernels
        if isinstance(kernel, FlashAttention4)
        and not isinstance(kernel, WholeWaves)
        and (is_dense or not kernel.needs_equal_segments)
        and (is_captured or not kernel.in_graphs_alone)
    ]
