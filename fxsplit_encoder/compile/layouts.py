"""Keeps the layouts that a graph's readers see, whatever a rewrite does to strides and offsets.

Most operations give the same for any layout. Those that read memory by strides of the trace, views that need
them, operators of other libraries and the graph's caller get the value as it was stored before.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxsplit_encoder._torch.dispatch import OpOverload, has_tag
from fxsplit_encoder.compile.rewriting import call_function, traced_value
from fxsplit_encoder.compile.sizes import expression

aten = torch.ops.aten

_OF_TORCH = ("aten", "prims", "fxsplit")
# Kernels of the last one refuse what is not contiguous; its traced form takes anything.
_BY_STRIDES = frozenset(
    """as_strided as_strided_ as_strided_copy as_strided_scatter stride sym_stride storage_offset
    sym_storage_offset is_contiguous sym_is_contiguous is_strides_like_format
    is_non_overlapping_and_dense native_group_norm""".split()
)
# Random numbers are drawn in the order of memory, but for attention's. Sizes that depend on values would be
# traced as others.
_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def sees_layout(node: fx.Node) -> bool:
    """Whether a node's result may depend on the memory layout of its inputs."""
    target = node.target
    if not isinstance(target, OpOverload):
        return target is not operator.getitem
    if target.namespace not in _OF_TORCH:
        return True
    name = target.overloadpacket.__name__
    tagged = any(has_tag(target, tag) for tag in _TAGS) and "attention" not in name
    return name in _BY_STRIDES or tagged


def traced_downstream(values: Mapping[fx.Node, Any]) -> dict[fx.Node, Any] | None:
    """Returns traced values of nodes downstream of the given values, as far as their layouts reach; None: an
    operation cannot read such a layout, or would give something else.
    """
    known = dict(values)
    outdated = {user for node in values for user in node.users}
    for node in next(iter(values)).graph.nodes:
        if node in outdated and node.op == "call_function":
            if sees_layout(node):
                return None
            try:
                known[node] = traced_value(node, known)
            except (RuntimeError, ValueError):
                return None
            if not _is_stored_alike(known[node], node.meta["val"]):
                outdated.update(node.users)
    return {node: value for node, value in known.items() if node not in values}


@dataclass(frozen=True, slots=True)
class _Call:
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any


@contextlib.contextmanager
def keeping_layouts(graph: fx.Graph) -> Iterator[None]:
    """Keeps the layouts that nodes see as before the rewrites inside, and redoes traced values. Where a
    layout is seen, the value is copied into the old one or, as a part of a larger one, computed as before.
    """
    before = {node: _Call(node.target, node.args, node.kwargs, node.meta.get("val")) for node in graph.nodes}
    yield
    _Rewritten(graph, before).keep_layouts()


class _Rewritten:
    def __init__(self, graph: fx.Graph, before: Mapping[fx.Node, _Call]) -> None:
        self._graph = graph
        self._before = before
        self._nodes = set(graph.nodes)
        self._replaced: dict[fx.Node, Any] = {}
        """Traced values of nodes until layouts that they read changed."""
        self._restored: dict[tuple[fx.Node, fx.Node], fx.Node] = {}

    def keep_layouts(self) -> None:
        for node in list(self._graph.nodes):
            if node.op not in ("call_function", "output"):
                continue
            changed = self._changed_inputs(node)
            outdated = not self._replaced.keys().isdisjoint(node.all_input_nodes)
            if sees_layout(node):
                self._restore(node, changed)
            elif outdated or (changed and not self._is_traced(node)):
                try:
                    self._trace(node)
                except (RuntimeError, ValueError):  # it cannot read what it is given
                    self._restore(node, changed)

    def _changed_inputs(self, node: fx.Node) -> dict[fx.Node, tuple[fx.Node, Any]]:
        """Inputs of a node with another layout than when it was traced, and the node and value of then."""
        was = self._before.get(node)
        reads = node.all_input_nodes
        if was is None:
            expected = [(each, self._replaced.get(each, each.meta.get("val"))) for each in reads]
        elif was.args is node.args and not any(n not in self._before or self._is_traced(n) for n in reads):
            return {}
        else:
            reads = list(_nodes_in(node.args, node.kwargs))
            expected = [(each, self._before[each].value) for each in _nodes_in(was.args, was.kwargs)]
            if len(reads) != len(expected):
                return {}  # the rewrite has made another call of it
        return {
            now: (old, value)
            for now, (old, value) in zip(reads, expected, strict=True)
            if _is_only_stored_otherwise(value, now.meta.get("val"))
        }

    def _is_traced(self, node: fx.Node) -> bool:
        was = self._before.get(node)
        return was is not None and was.value is not node.meta.get("val")

    def _trace(self, node: fx.Node) -> None:
        value = traced_value(node, {})
        if not _is_stored_alike(value, node.meta["val"]):
            self._replaced.setdefault(node, node.meta["val"])
            node.meta["val"] = value

    def _restore(self, node: fx.Node, changed: Mapping[fx.Node, tuple[fx.Node, Any]]) -> None:
        with self._graph.inserting_before(node):
            for now, (old, expected) in changed.items():
                if (now, old) not in self._restored:
                    self._restored[now, old] = self._stored_as(now, expected) or self._as_before(old)
                node.replace_input_with(now, self._restored[now, old])
        if changed and node.op == "call_function":
            self._trace(node)

    def _stored_as(self, node: fx.Node, expected: Tensor) -> fx.Node | None:
        """Returns a copy of a value with the expected layout; None if a copy cannot have it."""
        order = _order(expected)
        moved = call_function(self._graph, aten.permute.default, node, order)
        copied = call_function(self._graph, aten.clone.default, moved, memory_format=torch.contiguous_format)
        back = sorted(range(len(order)), key=order.__getitem__)
        result = call_function(self._graph, aten.permute.default, copied, back)
        if _is_stored_alike(result.meta["val"], expected):
            return result
        for each in (result, copied, moved):
            self._graph.erase_node(each)
        return None

    def _as_before(self, node: fx.Node) -> fx.Node:
        known = self._replaced.get(node, node.meta.get("val"))
        was = self._before.get(node) or _Call(node.target, node.args, node.kwargs, known)
        if node in self._nodes and (
            node.op != "call_function" or _is_stored_alike(was.value, node.meta["val"])
        ):
            return node
        if node in self._nodes and _is_only_stored_otherwise(was.value, node.meta["val"]):
            copied = self._stored_as(node, was.value)
            if copied is not None:
                return copied
        args, kwargs = fx.node.map_arg((was.args, was.kwargs), self._as_before)
        return call_function(self._graph, was.target, *args, **kwargs)


def _nodes_in(*arguments: Any) -> Iterable[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(arguments, found.append)
    return found


def _numbers(values: Iterable[int | torch.SymInt]) -> list[Any]:
    """Returns sizes or strides, comparable without a guard."""
    return [value if isinstance(value, int) else expression(value) for value in values]


def _is_stored_alike(one: Any, other: Any) -> bool:
    return one is other or _layouts(one) == _layouts(other)


def _is_only_stored_otherwise(one: Any, other: Any) -> bool:
    before, now = ([], []) if one is other else (_layouts(one), _layouts(other))
    return before != now and [sizes for sizes, _ in before] == [sizes for sizes, _ in now]


def _layouts(value: Any) -> list[tuple[Any, Any]]:
    """Returns the sizes of each tensor of a value, and its strides and offset."""
    return [
        (_numbers(each.shape), _numbers([*each.stride(), each.storage_offset()]))
        if isinstance(each, torch.Tensor)
        else (None, str(each))
        for each in (value if isinstance(value, list | tuple) else [value])
    ]


def _order(value: Tensor) -> list[int]:

    def length(number: int | torch.SymInt) -> int:
        found = expression(number)
        return int(found.subs(dict.fromkeys(found.free_symbols, 4096)))

    sizes, strides = map(length, value.shape), map(length, value.stride())
    keys = [(-stride, -size) for size, stride in zip(sizes, strides, strict=True)]
    return sorted(range(value.dim()), key=keys.__getitem__)


# --- of convolutions

_WIDEST_DEPTHWISE = 5  # pixels a side: MobileNetV3's and EfficientNet's windows, which gain or lose nothing
_NORMALIZATIONS = (aten.native_layer_norm.default, aten.var_mean.correction)  # as traced, and decomposed


def choice_of_layouts(graph: fx.Graph) -> dict[str, bool]:
    """Returns Inductor's settings for the layouts of a graph's convolutions on CUDA; empty: those they have.

    Channels are the innermost dimension where depthwise convolutions alternate with linear layers, as
    ConvNeXt's do: linear layers read them so, and a transpose on either side is saved. For constant sizes
    Inductor decides, which it refuses for symbolic ones.
    """
    weights = [_weight(node) for node in _convolutions(graph)]
    if (
        any(map(_is_depthwise, _convolutions(graph)))
        and all(weight.device.type == "cuda" for weight in weights)
        and not any(weight.shape[2:].numel() == 1 for weight in weights)
    ):
        return {"layout_optimization": True, "force_layout_optimization": True}
    return {"layout_optimization": True} if inductor_chooses_layouts(graph) else {}


def inductor_chooses_layouts(graph: fx.Graph) -> bool:
    """Whether the layouts of a graph's convolutions are left to Inductor, which then has all of them.

    Not with groups of several channels, nor with wide depthwise windows where no normalization reads
    channels side by side: those are slower with channels as the innermost dimension, which Inductor
    chooses nonetheless: on an H200 FastViT took 1.04 to 2.2 times as long, RegNetY 1.08 to 1.17 times.
    """
    convolutions = _convolutions(graph)
    sizes = [size for node in convolutions for size in node.args[0].meta["val"].shape]
    if not convolutions or not all(isinstance(size, int) for size in sizes):
        return False
    if any(_weight(node).device.type != "cuda" for node in convolutions):
        return False
    if any(node.args[8] > 1 and not _is_depthwise(node) for node in convolutions):
        return False
    is_normalized = any(node.target in _NORMALIZATIONS for node in graph.nodes)
    windows = [max(_weight(node).shape[2:]) for node in convolutions if _is_depthwise(node)]
    return is_normalized or max(windows, default=0) <= _WIDEST_DEPTHWISE


def _convolutions(graph: fx.Graph) -> list[Any]:
    return graph.find_nodes(op="call_function", target=aten.convolution.default)


def _weight(node: Any) -> Tensor:
    weight: Tensor = node.args[1].meta["val"]
    return weight


def _is_depthwise(node: Any) -> bool:
    return bool(node.args[8] > 1 and _weight(node).shape[1] == 1)
