"""Choose the kernels of a graph's attention that are compiled before they are called."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor, fx

from fxsplit_encoder.kernels import AUTO, compile_jobs
from fxsplit_encoder.kernels.attention.chooser import KernelChooser, current_chooser
from fxsplit_encoder.kernels.attention.flash_attn import FlashAttention4, WholeWaves
from fxsplit_encoder.kernels.attention.op import dense_attention, traced, varlen_attention
from fxsplit_encoder.kernels.compile_jobs import dismiss

__all__ = ["compile_ahead", "compiling_as_traced", "dismiss", "heads_of", "warm_up"]

Heads = tuple[torch.dtype, int]
"""Their dtype and width."""


def warm_up(device: torch.device) -> None:
    """Starts processes for `compile_ahead` if nothing was measured on the device; `dismiss` ends those not
    needed.
    """
    chooser = current_chooser()
    if not (_is_settled(chooser) or compile_jobs.why_not(device) or chooser.measurements.table(device)):
        # One more, for heads as the tower has them.
        compile_jobs.warm_up(len(_names(chooser, is_dense=False)) + 1, device)


class _Early:
    """Compile jobs started while a forward is traced. `stored_width` maps a width of heads to that in the
    graph.
    """

    def __init__(
        self, chooser: KernelChooser, device: torch.device, stored_width: Callable[[int], int]
    ) -> None:
        self._chooser = chooser
        self._device = device
        self._stored_width = stored_width
        self._known = _known_heads(chooser, device)
        self._met: set[Heads] = set()
        self._expected: set[compile_jobs.Job] = set()
        """Started for the graph alone, which may have other heads in the end."""

    def meet(self, query: Tensor) -> None:
        """Starts the jobs that attention with such heads will ask for."""
        dtype, width = query.dtype, query.shape[-1]
        if isinstance(width, int):  # else a symbol
            if (dtype, width) not in self._met:
                self._met.add((dtype, width))
                self._begin(dtype, width)

    def _begin(self, dtype: torch.dtype, width: int) -> None:
        stored = self._stored_width(width)
        if (dtype, stored) not in self._known:
            names = _names(self._chooser, is_dense=False)
            begun = compile_jobs.start(names, stored, dtype, self._device)
            self._expected.update(begun if stored != width else ())
        if stored != width and (dtype, width) not in self._known:
            compile_jobs.start(
                _names(self._chooser, is_dense=False, is_captured=False), width, dtype, self._device
            )

    def confirm(self, jobs: Iterable[compile_jobs.Job]) -> None:
        """Keeps what the graph asks for."""
        self._expected.difference_update(jobs)

    def end(self) -> None:
        """Abandons the jobs that the graph did not ask for."""
        compile_jobs.leave(self._expected)


_early: ContextVar[_Early | None] = ContextVar("fxsplit_encoder_early", default=None)


@contextlib.contextmanager
def compiling_as_traced(device: torch.device, stored_width: Callable[[int], int]) -> Iterator[None]:
    """Inside, packed attention that is traced starts the compile jobs that `compile_ahead` will ask for,
    without batches. Jobs for heads that the graph does not store wider as expected are abandoned at the
    end.

    Args:
        stored_width: how wide the graph will have heads of a width.
    """
    chooser = current_chooser()
    if _early.get() is not None or _is_settled(chooser) or compile_jobs.why_not(device):
        yield
        return
    early = _Early(chooser, device, stored_width)
    entered, token = _early.set(early), traced.set(early.meet)
    try:
        yield
    finally:
        traced.reset(token)
        _early.reset(entered)
        early.end()


def heads_of(nodes: Iterable[fx.Node]) -> dict[Heads, bool]:
    """The heads of fixed width that attend among some nodes, and whether to a batch somewhere."""
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
    """Starts to compile the kernels that will be compared for the attention among some nodes; none where a
    setting chooses, or times of such heads are known.

    Args:
        eager: heads of the tower's own forward, which is timed too: passes may store the graph's wider.
    """
    chooser = current_chooser()
    if _is_settled(chooser) or compile_jobs.why_not(device):
        return
    known, early = _known_heads(chooser, device), _early.get()
    captured = heads_of(nodes)
    wanted = {heads: _names(chooser, is_dense=is_dense) for heads, is_dense in captured.items()}
    for heads in eager:
        wanted.setdefault(heads, _names(chooser, is_dense=False, is_captured=False))
    for (dtype, head_dim), names in wanted.items():
        if (dtype, head_dim) not in known:
            compile_jobs.start(names, head_dim, dtype, device)
            if early is not None:
                early.confirm(compile_jobs.jobs_of(names, head_dim, dtype))


def _known_heads(chooser: KernelChooser, device: torch.device) -> set[Heads]:
    """Heads whose kernels were measured, and so are compiled."""
    table = chooser.measurements.table(device)
    return {(shape.dtype, shape.head_dim) for shape, found in table.items() if found.microseconds}


def _is_settled(chooser: KernelChooser) -> bool:
    return chooser.policy.one_attention_kernel or any(pin.kernel != AUTO for pin in chooser.pins)


def _names(chooser: KernelChooser, *, is_dense: bool, is_captured: bool = True) -> list[str]:
    """Kernels that compile a variant of their own; those that cut at whole waves call two of these."""
    return [
        kernel.name
        for kernel in chooser.measurements.kernels
        if isinstance(kernel, FlashAttention4)
        and not isinstance(kernel, WholeWaves)
        and (is_dense or not kernel.needs_equal_segments)
        and (is_captured or not kernel.in_graphs_alone)
    ]
