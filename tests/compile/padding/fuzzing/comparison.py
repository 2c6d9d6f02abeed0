"""The padded run of a graph next to the exact one, node by node.

What the proof says of a tensor is that its first entries along one dimension are those of the exact run.
Each call gets the exact entries in front of the garbage, so only the rounding of this one call is tolerated:
no tolerance grows along a chain.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxsplit_encoder.compile.padding import Rows

from .inputs import Source
from .kernels import run

Values = dict[fx.Node, Any]
_LARGEST_TENSOR = 3_000_000


class NotRunnableError(Exception):
    """The graph fails without any padding, for this token count."""


@dataclass(frozen=True)
class Wrong:
    """A node that is not what the proof says."""

    node: fx.Node
    why: str
    count: int
    padded_count: int
    garbage: str


def _concrete(argument: Any, values: Values) -> Any:
    return fx.node.map_arg(argument, lambda n: values[n])


def _computed(node: fx.Node, values: Values) -> Any:
    if node.target is operator.getitem:
        return values[node.args[0]][node.args[1]]  # type: ignore[index]
    return run(node.target, _concrete(node.args, values), _concrete(node.kwargs, values))


def run_exact(graph: fx.Graph, sources: Mapping[fx.Node, Source], count: int) -> Values:
    """Every value for a token count.

    Raises:
        NotRunnableError: a call fails, or gives a tensor that is too large or not what was traced.
    """
    values: Values = {}
    for node in graph.nodes:
        if node in sources:
            values[node] = sources[node].exact(count)
            continue
        try:
            values[node] = _computed(node, values)
        except Exception as error:
            raise NotRunnableError(f"{node.format_node()}: {error}") from error
        value = values[node]
        if isinstance(value, Tensor):
            is_comparable = value.dtype is not torch.complex32  # no kernel compares these
            if value.dim() != node.meta["val"].dim() or value.numel() > _LARGEST_TENSOR or not is_comparable:
                raise NotRunnableError(f"{node.format_node()}: {tuple(value.shape)}")
    return values


def compare(
    graph: fx.Graph,
    sources: Mapping[fx.Node, Source],
    mixed: Collection[str],
    joined: Mapping[str, Rows],
    exact: Values,
    counts: tuple[int, int],
    garbage: str,
) -> Wrong | None:
    """The first node that is not in `mixed` and does not begin with its exact value, if any.

    Args:
        mixed: the names of nodes of which nothing is claimed.
        joined: those whose rows lie in several blocks, each of which begins with its exact entries.
        exact: the values for the first of `counts`; the padded run is as long as the second says.
    """
    values: Values = {}
    for node in graph.nodes:
        if node in sources:
            values[node] = sources[node].padded(*counts, garbage)
            continue
        if node.name in mixed or any(n not in values for n in node.all_input_nodes):
            continue
        try:
            values[node] = _computed(node, values)
        except Exception as error:
            return Wrong(node, f"fails: {type(error).__name__}: {error}", *counts, garbage)
        try:
            values[node] = _with_exact(node, values[node], exact, joined.get(node.name))
        except _DiffersError as error:
            return Wrong(node, str(error), *counts, garbage)
    return None


class _DiffersError(Exception):
    """A value does not begin with the exact one."""


def _with_exact(node: fx.Node, value: Any, exact: Values, joined: Rows | None) -> Any:
    """The value with its first entries replaced by the exact ones, which they must equal but for rounding."""
    expected = exact[node]
    if isinstance(value, list | tuple):
        # `getitem` looks at the parts.
        return value
    if not isinstance(value, Tensor):
        return value
    blocks, dim = (int(joined.blocks), joined.dim) if joined is not None else (1, 0)
    parts, expected_parts = _in_blocks(value, blocks, dim), _in_blocks(expected, blocks, dim)
    prefix = _prefix(parts, expected_parts).reshape(expected.shape)
    if _same_bits(prefix, expected):
        return value
    if not _is_rounding(node, prefix, exact):
        raise _DiffersError(_difference(prefix, expected))
    parts = parts.clone()
    parts[tuple(slice(0, size) for size in expected_parts.shape)] = expected_parts
    return parts.reshape(value.shape)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are equal, zeros' signs included: kernels differ in these by the place in a vector."""
    if not torch.equal(one, other):
        return False
    signed = one.is_floating_point() and one.dtype.itemsize > 1
    return not signed or torch.equal(one.signbit(), other.signbit())


def _in_blocks(value: Tensor, blocks: int, dim: int) -> Tensor:
    return value.unflatten(dim, (blocks, -1)) if blocks != 1 else value


def _prefix(value: Tensor, expected: Tensor) -> Tensor:
    if value.dtype != expected.dtype or value.dim() != expected.dim():
        raise _DiffersError(
            f"{value.dtype} {tuple(value.shape)}, not {expected.dtype} {tuple(expected.shape)}"
        )
    differing = [d for d in range(value.dim()) if value.shape[d] != expected.shape[d]]
    if len(differing) > 1:
        raise _DiffersError(f"two sizes change: {tuple(expected.shape)} to {tuple(value.shape)}")
    for dim in differing:
        if value.shape[dim] < expected.shape[dim]:
            raise _DiffersError(f"gets smaller: {tuple(expected.shape)} to {tuple(value.shape)}")
        value = value.narrow(dim, 0, expected.shape[dim])
    return value


def _is_rounding(node: fx.Node, value: Tensor, exact: Values) -> bool:
    """Whether inputs changed in their last bits change the result by as much, at the same entries."""
    expected = exact[node]
    if not expected.is_floating_point() and not expected.is_complex():
        return False
    # Kernels round otherwise in the last, incomplete vector of a tensor.
    allowed = torch.finfo(expected.dtype).eps * expected.abs().double().nan_to_num(posinf=0.0)
    source = node.args[0] if node.target is operator.getitem else node
    assert isinstance(source, fx.Node)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        changed = {n: _perturbed(exact[n], generator) for n in source.all_input_nodes}
        result = _computed(source, changed)
        result = result[node.args[1]] if source is not node else result
        allowed = torch.maximum(allowed, _distance(result, expected))
    return bool((_distance(value, expected) <= 100 * allowed).all())


def _distance(one: Tensor, other: Tensor) -> Tensor:
    one, other = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (one, other))
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=float("inf"))


def _perturbed(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor) or value.dtype.itemsize == 1:
        return value
    if not (value.is_floating_point() or value.is_complex()):
        return value
    noise = torch.rand(value.shape, generator=generator, dtype=torch.float64) - 0.5
    return (value * (1 + 50 * torch.finfo(value.dtype).eps * noise)).to(value.dtype)


def _difference(value: Tensor, expected: Tensor) -> str:
    unequal = ~((value == expected) | ((value != value) & (expected != expected)))
    place = tuple(unequal.nonzero()[0].tolist()) if unequal.any() else ()
    return f"entry {place} is {value[place]}, not {expected[place]}"


def pairs(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Each count with the next ones, at most four pairs."""
    ordered = sorted(counts)
    found = [(a, b) for i, a in enumerate(ordered) for b in ordered[i + 1 :]]
    return found[:4]
