"""What only the outputs read runs on a branch of the graph, parallel to the blocks after it."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from fxsplit_encoder._torch.distributed import calls_other_ranks
from fxsplit_encoder.compile.rewriting import cuts_after_host_ops, is_parameter, mark_beside

aten = torch.ops.aten


def output_branch(module: fx.GraphModule) -> int:
    """Layers between two attentions that nothing but the outputs reads, as Qwen3-VL's deepstack mergers.

    Exact: the same operations on the same values; they become a piece of their own, which runs parallel to
    the blocks after it where there are streams, and is waited for where it is read.
    """
    cuts = cuts_after_host_ops(module)
    needed = _behind(cuts)
    aside: list[list[fx.Node]] = []
    begun = False
    for node in module.graph.nodes:
        if node in cuts:
            aside.append([])
            begun = True
        elif begun and node.op == "call_function" and node not in needed:
            aside[-1].append(node)
    # Behind the last cut nothing is left to run beside. Ranks have to call one another in one order.
    groups = [
        nodes
        for nodes in aside[:-1]
        if any(map(_is_product, nodes)) and not any(calls_other_ranks(node.target) for node in nodes)
    ]
    for nodes in groups:
        mark_beside(nodes)
    return len(groups)


def _behind(cuts: Collection[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = list(cuts)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _is_product(node: fx.Node) -> bool:
    """Whether a node multiplies with a weight: what is less is not worth a piece of its own."""
    return node.target is not aten.t.default and any(map(_is_weight, node.all_input_nodes))


def _is_weight(node: fx.Node) -> bool:
    given = node.args[0] if node.target is aten.t.default else node
    return is_parameter(given) and isinstance(given, fx.Node) and given.meta["val"].dim() >= 2
