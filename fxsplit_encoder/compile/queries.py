"""What the queries of splitting ops tell: which size of a graph counts tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxsplit_encoder._torch.dispatch import OpOverload
from fxsplit_encoder.compile.pieces import Piece
from fxsplit_encoder.compile.sizes import expression, symbol_of
from fxsplit_encoder.compile.split import Cut
from fxsplit_encoder.errors import CompileError

_ATTENTION_NAME = re.compile("attention|attn|sdpa", re.IGNORECASE)


def token_symbol_of(parts: Sequence[Piece | Cut]) -> str | None:
    """The symbol in the leading size of the splitting ops' queries; where those are constant, as in (1,
    tokens, heads, head_dim), the one symbol in the first size that is not. None where there is none.

    Raises:
        CompileError: leading sizes have different ones.
    """
    queries = [query for _, query in _queries(parts)]
    leading = {symbol_of(query.shape[0]) for query in queries if query.dim()}
    if len(leading) > 1:
        raise CompileError(
            f"attention runs over different token counts ({sorted(map(str, leading))}); expected "
            "one symbol in the leading size of every query"
        )
    if leading != {None}:
        return next(iter(leading), None)
    inner = {_first_symbol(query) for query in queries}
    return inner.pop() if len(inner) == 1 else None


def tokens_unknown(parts: Sequence[Piece | Cut], splitting_ops: Sequence[str]) -> str:
    """Why the queries tell no token symbol: what was seen instead."""
    seen = [f"{op} over {tuple(query.shape)}" for op, query in _queries(parts)]
    if seen:
        return (
            f"its splitting ops ({', '.join(dict.fromkeys(seen))}) do not have one size that varies, which "
            "would count its tokens"
        )
    others = [op for op in _ops(parts) if _ATTENTION_NAME.search(op)]
    hint = f"; {' and '.join(dict.fromkeys(others))} in its graph could be listed there" if others else ""
    return (
        "it has no splitting op, so nothing tells which of its sizes counts tokens: none of splitting_ops "
        f"({', '.join(splitting_ops)}) is in its graph{hint}"
    )


def _queries(parts: Sequence[Piece | Cut]) -> Iterator[tuple[str, Tensor]]:
    """The splitting ops by name, each with its first tensor."""
    for part in parts:
        if isinstance(part, Cut) and not part.is_host:
            values = (node.meta.get("val") for node in part.node.all_input_nodes)
            query = next((value for value in values if isinstance(value, torch.Tensor)), None)
            if query is not None:
                yield _name_of(part.node.target), query


def _first_symbol(query: Tensor) -> str | None:
    varying = next((symbols for size in query.shape if (symbols := expression(size).free_symbols)), ())
    return str(next(iter(varying))) if len(varying) == 1 else None


def _ops(parts: Sequence[Piece | Cut]) -> Iterator[str]:
    nodes: list[fx.Node] = []
    for part in parts:
        nodes += [part.node] if isinstance(part, Cut) else part.nodes
    yield from (_name_of(node.target) for node in nodes if isinstance(node.target, OpOverload))


def _name_of(target: Any) -> str:
    """An op without its overload, as `splitting_ops` has it."""
    return str(target.name()).split(".")[0]
