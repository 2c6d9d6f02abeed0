"""The region of a graph, which may run padded and be captured: what enters it, and what is proved of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from fxsplit_encoder._torch.symbols import expression_of
from fxsplit_encoder.compile import padding
from fxsplit_encoder.compile.permute import permute_rows
from fxsplit_encoder.compile.pieces import Piece
from fxsplit_encoder.compile.program import RegionInput
from fxsplit_encoder.compile.split import Cut, is_scalar
from fxsplit_encoder.compile.steps import Slots, tensor_info


def is_packed_attention(target: Any) -> bool:
    """Whether a node's target is packed attention, which takes cumulative lengths."""
    return "varlen_attention" in str(target)


class Region:
    """The parts of a graph after its last host op.

    Args:
        parts: the parts, in order.
        outputs: the outputs of the graph.
        fixed: inputs of the graph that are the same from call to call, or that the program makes itself.
        slots: where the program keeps values.
        token_symbol: the symbol that counts tokens, if any.
    """

    def __init__(
        self,
        parts: Sequence[Piece | Cut],
        outputs: Sequence[Any],
        fixed: Collection[fx.Node],
        slots: Slots,
        token_symbol: str | None,
    ) -> None:
        self._token_symbol = token_symbol
        self._nodes: list[fx.Node] = []
        read: dict[fx.Node, None] = {}
        segments: set[Any] = set()
        permutations: set[Any] = set()
        for part in parts:
            if isinstance(part, Cut):
                self._nodes += (part.node, *part.unpacked)
                read.update(dict.fromkeys(part.node.all_input_nodes))
                if is_packed_attention(part.node.target):
                    segments.add(part.node.args[3])
            else:
                self._nodes += part.nodes
                read.update(dict.fromkeys(part.inputs))
                permutations.update(n.args[1] for n in part.nodes if n.target is permute_rows)
        self._outputs = [output for output in outputs if isinstance(output, fx.Node)]
        read.update(dict.fromkeys(self._outputs))
        known = {*self._nodes, *fixed}
        self.inputs = {
            node: RegionInput(
                slot=slots.of(node),
                info=tensor_info(node),
                is_segments=node in segments,
                token_dim=None if node in segments else self._token_dim(node),
                is_permutation=node in permutations,
            )
            for node in read
            if node not in known and not is_scalar(node)
        }
        """What enters the region and changes from call to call, in the order in which it is first read."""

    def _token_dim(self, node: fx.Node) -> int | None:
        if self._token_symbol is None:
            return None
        return padding.token_dim(node.meta["val"], self._token_symbol)

    def symbols(self, *, with_segments: bool) -> tuple[str, ...]:
        """The symbols that sizes and numbers inside the region use, other than the token symbol.

        Pieces get others as inputs too, for their compilers; those do not count.

        Args:
            with_segments: whether those count that say how many segments there are, whatever reads them.
        """
        values = [
            n.meta.get("val")  # an assertion has none
            for node in self._nodes
            for n in (node, *(i for i in node.all_input_nodes if is_scalar(i)))
        ]
        used = {symbol for value in values for symbol in _symbols_in(value)}
        counted = [entry for entry in self.inputs.values() if with_segments or not entry.is_segments]
        sizes = [size for entry in counted for size in entry.info.shape]
        used |= {symbol for size in sizes for symbol in size.symbols}
        return tuple(sorted(used - {self._token_symbol or ""}))

    def prove(self, assumptions: Sequence[sympy.Basic]) -> padding.PaddingReport:
        """Whether the region may be padded, see `compile.padding`.

        Args:
            assumptions: what the trace assumes of its symbols.
        """
        if self._token_symbol is None:
            return padding.PaddingReport((("graph", "no dimension of a splitting op's query is symbolic"),))
        seeds = {node: _seed(entry) for node, entry in self.inputs.items()}
        return padding.analyse(self._nodes, seeds, self._token_symbol, assumptions, self._outputs)


def _seed(entry: RegionInput) -> padding.State:
    """What the proof takes an input to be."""
    if entry.is_segments:
        return padding.SEGMENTS
    return padding.SHARED if entry.token_dim is None else padding.Rows(entry.token_dim)


def _symbols_in(value: Any) -> set[str]:
    """The symbols in a traced number, or in the sizes of a traced tensor or several."""
    if isinstance(value, list | tuple):
        return {symbol for v in value for symbol in _symbols_in(v)}
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return {str(s) for size in sizes if hasattr(size, "node") for s in expression_of(size).free_symbols}
