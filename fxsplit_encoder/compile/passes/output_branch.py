"""Run nodes that only the outputs read on a branch of the graph, parallel to the blocks after them."""

from __future__ import annotations

import itertools

import torch
from torch import fx

from fxsplit_encoder._torch.distributed import calls_other_ranks
from fxsplit_encoder.compile.rewriting import BESIDE, cuts_after_host_ops, is_parameter

aten = torch.ops.aten


def output_branch(module: fx.GraphModule) -> int:
    """Marks layers between two attentions that only the outputs read, such as Qwen3-VL's deepstack mergers.

    Exact: the same operations on the same values; they become a piece of their own, which runs parallel to
    the blocks after it where there are streams, and is waited for where it is read.
    """
    cuts = cuts_after_host_ops(module)
    needed = set(cuts)
    for node in reversed(module.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    aside: list[list[fx.Node]] = []
    for node in module.graph.nodes:
        if node in cuts:
            aside.append([])
        elif aside and node.op == "call_function" and node not in needed:
            aside[-1].append(node)
    # After the last cut no step is left to be parallel to. Ranks have to call one another in one order.
    groups = [
        nodes
        for nodes in aside[:-1]
        if any(map(_is_product, nodes)) and not any(calls_other_ranks(node.target) for node in nodes)
    ]
    for node in itertools.chain.from_iterable(groups):
        node.meta[BESIDE] = True
    return len(groups)


def _is_product(node: fx.Node) -> bool:
    """Whether a node multiplies with a weight; other nodes are too short for a piece."""
    if node.target is aten.t.default:
        return False
    read = (each.args[0] if each.target is aten.t.default else each for each in node.all_input_nodes)
    weights = (each for each in read if isinstance(each, fx.Node) and is_parameter(each))
    return any(each.meta["val"].dim() >= 2 for each in weights)
