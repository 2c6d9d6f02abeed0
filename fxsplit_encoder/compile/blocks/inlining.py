"""Copies of the graphs of blocks in the places of their ops."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxsplit_encoder._torch.aot import fake_mode_of
from fxsplit_encoder.compile.blocks.group import BlockError, LiveWeights, fake_weight, weights_of
from fxsplit_encoder.compile.blocks.op import block_op, group_of
from fxsplit_encoder.compile.sizes import expression, layout


def inline_blocks(module: fx.GraphModule) -> LiveWeights:
    """Puts the graph of its block in the place of each op.

    Args:
        module: an ATen graph whose nodes carry traced values in `meta["val"]`.

    Returns:
        The weights of the blocks, which are inputs of the graph now, after those that it had.

    Raises:
        CompileError: a block does more than an op may.
    """
    inlining = _Inlining(module.graph)
    for call in module.graph.find_nodes(op="call_function", target=block_op):
        inlining.inline(call)
    return inlining.weights


class _Inlining:
    """Puts the graphs of blocks into a forward's graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.weights = LiveWeights()
        inputs = graph.find_nodes(op="placeholder")
        self._last_input: fx.Node | None = inputs[-1] if inputs else None
        self._weight_nodes: dict[tuple[int, int, str], fx.Node] = {}
        self._scalars: dict[sympy.Expr, fx.Node] = {
            expression(n.meta["val"]): n for n in inputs if isinstance(n.meta["val"], torch.SymInt)
        }

    def inline(self, call: fx.Node) -> None:
        """Puts the graph of its block in the place of an op."""
        arguments: Any = call.args
        tensors, numbers, structure, number, index = arguments
        values = fx.node.map_arg((tensors, numbers), lambda n: n.meta["val"])
        group = group_of(number)
        body = group.body(*values, structure)
        inputs = body.graph.find_nodes(op="placeholder")
        given = [*tensors, *(n for n in numbers if isinstance(n, fx.Node))]
        copies = dict(zip(inputs, given, strict=False))
        weights = weights_of(group.blocks[index])
        fake_mode = fake_mode_of(values[0])
        for node, (name, weight) in zip(inputs[len(given) :], weights.items(), strict=True):
            if node.users:
                key = (number, index, name)
                if key not in self._weight_nodes:
                    self._weight_nodes[key] = self._add_weight(weight, fake_mode)
                    self.weights.add(group, index, name)
                copies[node] = self._weight_nodes[key]
        output = self._copy_body(call, body, copies)
        if layout(output.meta["val"]) != layout(call.meta["val"]):
            raise BlockError("a block's own trace returns another layout than in the forward")
        # Copies share their traced values, but no two inputs of a piece may: only results leave a block.
        output.meta["val"] = call.meta["val"]
        call.replace_all_uses_with(output)
        self.graph.erase_node(call)

    def _add_weight(self, weight: Tensor, fake_mode: Any) -> fx.Node:
        assert self._last_input is not None
        with self.graph.inserting_after(self._last_input):
            self._last_input = self.graph.placeholder(f"weight_{len(self.weights)}")
        self._last_input.meta["val"] = fake_weight(fake_mode, weight)
        return self._last_input

    def _copy_body(self, call: fx.Node, body: fx.GraphModule, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        with self.graph.inserting_before(call):
            for node in body.graph.nodes:
                if node.op == "get_attr":
                    raise BlockError(f"a block makes a constant tensor, {node.target}")
                if node.op == "call_function":
                    copies[node] = self._copy(node, copies)
        results: Any = body.graph.output_node().args[0]
        if len(results) != 1:
            raise BlockError("a block writes to its arguments")
        return copies[results[0]]

    def _copy(self, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        """A node of a block; a number that the forward has already is the node that it has."""
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt):
            return self.graph.node_copy(node, copies.__getitem__)
        if expression(value) not in self._scalars:
            self._scalars[expression(value)] = self.graph.node_copy(node, copies.__getitem__)
        return self._scalars[expression(value)]
