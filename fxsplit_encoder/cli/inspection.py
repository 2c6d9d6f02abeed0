"""`encoder-cg inspect`: how a tower would be split and captured."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx as torch_fx

import fxsplit_encoder as fx
from fxsplit_encoder.capture import segment_capacity
from fxsplit_encoder.cli.console import describe_device, print_facts, print_table, progress_bars
from fxsplit_encoder.cli.describe import describe_split, describe_tower, operator_name
from fxsplit_encoder.compile import BoundProgram
from fxsplit_encoder.manager import Limits

_SHOWN_OPERATORS = 4


class PieceRecorder:
    """A piece compiler that keeps the graph of every distinct piece and runs it as traced."""

    def __init__(self) -> None:
        self.graphs: list[torch_fx.Graph] = []

    def __call__(self, module: torch_fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Record a piece; its position is the number of the distinct piece."""
        self.graphs.append(module.graph)
        return module.forward


def run_inspect(tower: torch.nn.Module, config: fx.EncoderConfig) -> None:
    """Trace and split a tower, without compiling its pieces or capturing, and print what came of it.

    Raises:
        ConfigError: the settings do not suit the tower.
    """
    device = next(tower.parameters()).device
    print_facts({"tower": describe_tower(tower), "device": describe_device(device)})
    recorder = PieceRecorder()
    wrapped = fx.wrap(tower)
    limits = fx.EncoderCudaGraphManager(wrapped, config).limits
    # A split is the same for every size. Two small ones tell which sizes vary, and take no time on a CPU.
    smallest = min(budgets[0] for budgets in limits.path_budgets.values())
    small = config.replace(token_budgets=(smallest, 2 * smallest), paths={}, piece_compiler=recorder)
    manager = fx.EncoderCudaGraphManager(wrapped, small)
    with progress_bars() as bar:
        manager.compile(progress=bar("tracing"))
    graphs = iter(recorder.graphs)
    for path, bound in manager.programs.items():
        print_facts({"split": describe_split(path, bound)})
        if bound is not None:
            _print_program(bound, [next(graphs) for _ in range(bound.program.num_distinct)])
    for report in manager.reports:
        print_facts({"note": report})
    _print_budgets(limits)


def _print_program(bound: BoundProgram, graphs: Sequence[torch_fx.Graph]) -> None:
    program = bound.program
    kinds = Counter(step.kind for step in program.steps)
    parts = f"{kinds['piece']} pieces, {kinds['split']} splitting ops, {kinds['host']} host ops"
    print_facts({"steps": f"{len(program.steps)}: {parts}", "padding": _padding(bound)})
    positions: dict[int, list[int]] = {}
    for position, step in enumerate(program.pieces):
        positions.setdefault(step.distinct, []).append(position)
    rows = [
        [number, len(positions[number]), *_nodes(graph), _ranges(positions[number])]
        for number, graph in enumerate(graphs)
    ]
    print()
    print_table(["distinct", "pieces", "nodes", "most frequent operators but views", "positions"], rows)


def _padding(bound: BoundProgram) -> str:
    report = bound.program.padding
    if report.proved:
        return "proved: no row depends on the rows after it"
    return "not proved: " + "; ".join(f"{node}: {reason}" for node, reason in report.reasons)


def _nodes(graph: torch_fx.Graph) -> tuple[int, str]:
    """How many nodes a piece has, and which operators that are no views are the most frequent."""
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    operators = Counter(_short_name(target) for target in targets if not _is_view(target))
    shown = [f"{count} {name}" for name, count in operators.most_common(_SHOWN_OPERATORS)]
    return len(targets), ", ".join([*shown, *(["..."] if len(operators) > len(shown) else [])])


def _short_name(target: Any) -> str:
    return operator_name(target).removeprefix("aten::").split(".")[0]


def _is_view(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return target is operator.getitem or (schema is not None and any(r.alias_info for r in schema.returns))


def _ranges(numbers: Sequence[int]) -> str:
    """Increasing numbers, runs of them shortened: 1-7, 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _print_budgets(limits: Limits) -> None:
    items, frames = limits.max_items_per_batch, limits.max_frames_per_batch
    print(f"\nA replay holds at most {items} items, {frames} video frames, and on each path:")
    rows = [
        [path, budget, segment_capacity(budget, max(items, frames))]
        for path, budgets in limits.path_budgets.items()
        for budget in budgets
    ]
    print_table(["path", "budget", "segments"], rows)
