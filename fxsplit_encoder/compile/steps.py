"""The parts of a split graph as the steps of a program, whose values live in slots."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxsplit_encoder.compile.host import host_op
from fxsplit_encoder.compile.options import TRACING_PHASES, CompileOptions
from fxsplit_encoder.compile.pieces import Piece, PieceCache
from fxsplit_encoder.compile.program import Argument, Ref, Step, TensorInfo
from fxsplit_encoder.compile.rewriting import node_value
from fxsplit_encoder.compile.sizes import Size
from fxsplit_encoder.compile.split import Cut, is_scalar


class Slots:
    """A slot for each node that has a value, numbered in the order in which they are first asked for."""

    def __init__(self) -> None:
        self._numbers: dict[fx.Node, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, node: fx.Node) -> int:
        """The slot of a node's value."""
        return self._numbers.setdefault(node, len(self._numbers))

    def argument(self, argument: Any) -> Argument:
        """A node's argument as that of a step."""
        if isinstance(argument, fx.Node):
            return Size.of(node_value(argument)) if is_scalar(argument) else Ref(self.of(argument))
        if isinstance(argument, list | tuple):
            return type(argument)(self.argument(a) for a in argument)
        return argument


def tensor_info(node: fx.Node) -> TensorInfo:
    """What the trace knows of a node's tensor."""
    value = node.meta["val"]
    return TensorInfo(node.name, tuple(Size.of(s) for s in value.shape), value.dtype, value.device)


def make_steps(
    parts: Sequence[Piece | Cut], slots: Slots, cache: PieceCache, options: CompileOptions
) -> list[Step]:
    """The steps of a graph's parts, in order; compiles the distinct pieces and reports the progress."""
    steps: list[Step] = []
    num_pieces = sum(1 for part in parts if not isinstance(part, Cut))
    done = TRACING_PHASES
    options.report(done, num_pieces)
    for part in parts:
        if isinstance(part, Cut):
            steps.append(_cut_step(part, slots))
            continue
        steps.append(_piece_step(part, f"piece_{done - TRACING_PHASES}", slots, cache))
        done += 1
        options.report(done, num_pieces)
    return steps


def _piece_step(piece: Piece, name: str, slots: Slots, cache: PieceCache) -> Step:
    distinct, call = cache.get(piece)
    return Step(
        kind="piece",
        name=name,
        call=call,
        args=tuple(slots.argument(n) for n in piece.inputs),
        kwargs={},
        outputs=tuple(slots.of(n) for n in piece.outputs),
        returns_tensor=False,
        distinct=distinct,
        nodes=tuple(node.name for node in piece.nodes),
        beside=piece.beside,
    )


def _cut_step(cut: Cut, slots: Slots) -> Step:
    node = cut.node
    returns_tensor = isinstance(node.meta["val"], torch.Tensor)
    if returns_tensor:
        outputs: tuple[int, ...] = (slots.of(node),)
    else:
        by_index = {int(n.args[1]): slots.of(n) for n in cut.unpacked}  # type: ignore[arg-type]
        outputs = tuple(by_index.get(i, -1) for i in range(len(node.meta["val"])))
    call = host_op(node.target) or node.target
    assert callable(call)
    return Step(
        kind="host" if cut.is_host else "split",
        name=node.name,
        call=call,
        args=tuple(slots.argument(a) for a in node.args),
        kwargs={k: slots.argument(v) for k, v in node.kwargs.items()},
        outputs=outputs,
        returns_tensor=returns_tensor,
        nodes=(node.name,),
    )


def with_joins(steps: Sequence[Step]) -> list[Step]:
    """The steps, those marked that read what an earlier one computes beside, unless another has waited."""
    open_slots: set[int] = set()
    marked: list[Step] = []
    for step in steps:
        reads = slots_in((step.args, tuple(step.kwargs.values())))
        if step.beside:
            open_slots.update(step.outputs)
        elif not open_slots.isdisjoint(reads):
            step = replace(step, joins=True)
            open_slots.clear()
        marked.append(step)
    return marked


def with_frees(steps: Sequence[Step], kept: Collection[int]) -> list[Step]:
    """The steps with the slots that no later step reads, so that a run holds no more memory than eager does.

    What a step beside others reads or writes is kept until one of them joins: until then nothing else may get
    its memory.

    Args:
        steps: the steps of a program, in order.
        kept: the slots that outlive the steps: those of the program's inputs, constants and outputs.
    """
    last_use: dict[int, int] = {}
    for index, step in enumerate(steps):
        joined = next((i for i in range(index, len(steps)) if steps[i].joins), len(steps))
        for slot in (*step.outputs, *slots_in((step.args, tuple(step.kwargs.values())))):
            last_use[slot] = max(last_use.get(slot, 0), joined if step.beside else index)
    frees: list[list[int]] = [[] for _ in steps]
    for slot, index in last_use.items():
        if slot >= 0 and slot not in kept and index < len(steps):
            frees[index].append(slot)
    return [replace(step, frees=tuple(f)) for step, f in zip(steps, frees, strict=True)]


def slots_in(argument: Argument) -> list[int]:
    """The slots that an argument refers to, nested ones included."""
    if isinstance(argument, Ref):
        return [argument.slot]
    if isinstance(argument, list | tuple):
        return [slot for a in argument for slot in slots_in(a)]
    return []
