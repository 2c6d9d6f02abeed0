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
    chooser = current_chooser()
    if not (_is_settled(chooser) or compile_jobs.why_not(device) or chooser.measurements.table(device)):
        # One more, for heads as the tower has them.
        compile_jobs.warm_up(len(_names(chooser, is_dense=False)) + 1, device)


@contextlib.contextmanager
def compiling_as_traced(device: torch.device, stored_width: Callable[[int], int]) -> Iterator[None]:
    """Starts jobs of `compile_ahead` while attention is traced; `stored_width` maps a traced width of heads
    to that of the graph.
    """
    chooser = current_chooser()
    if _is_settled(chooser) or compile_jobs.why_not(device):
        yield
        return
    known, met = _known_heads(chooser, device), set[Heads]()

    def meet(query: Tensor) -> None:
        dtype, width = query.dtype, query.shape[-1]
        if (dtype, width) in met or not isinstance(width, int):  # it may be a symbol
            return
        met.add((dtype, width))
        stored = stored_width(width)
        if (dtype, stored) not in known:
            compile_jobs.start(_names(chooser, is_dense=False), stored, dtype, device)
        if stored != width and (dtype, width) not in known:
            names = _names(chooser, is_dense=False, is_captured=False)
            compile_jobs.start(names, width, dtype, device)

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
    chooser = current_chooser()
    if _is_settled(chooser) or compile_jobs.why_not(device):
        return
    known, captured = _known_heads(chooser, device), heads_of(nodes)
    wanted = {heads: _names(chooser, is_dense=is_dense) for heads, is_dense in captured.items()}
    for heads in eager:
        wanted.setdefault(heads, _names(chooser, is_dense=False, is_captured=False))
    for (dtype, head_dim), names in wanted.items():
        if (dtype, head_dim) not in known:
            compile_jobs.start(names, head_dim, dtype, device)


def _known_heads(chooser: KernelChooser, device: torch.device) -> set[Heads]:
    # Kernels that were measured are compiled.
    table = chooser.measurements.table(device)
    return {(shape.dtype, shape.head_dim) for shape, found in table.items() if found.microseconds}


def _is_settled(chooser: KernelChooser) -> bool:
    return chooser.policy.one_attention_kernel or bool(chooser.pinned_names)


def _names(chooser: KernelChooser, *, is_dense: bool, is_captured: bool = True) -> list[str]:
    # Those that cut at whole waves call two of the others.
    return [
        kernel.name
        for kernel in chooser.measurements.kernels
        if isinstance(kernel, FlashAttention4)
        and not isinstance(kernel, WholeWaves)
        and (is_dense or not kernel.needs_equal_segments)
        and (is_captured or not kernel.in_graphs_alone)
    ]
