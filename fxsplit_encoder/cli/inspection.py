"""`encoder-cg inspect`: how a tower is split and captured, which pieces may be padded, and its kernels."""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx as torch_fx

import fxsplit_encoder as fx
from fxsplit_encoder._torch.dispatch import schema_of
from fxsplit_encoder._torch.transformers import no_init_weights
from fxsplit_encoder.capture.forward import CapturedForward
from fxsplit_encoder.capture.inputs import segment_capacity
from fxsplit_encoder.cli.console import (
    describe_device,
    describe_split,
    describe_tower,
    operator_name,
    progress_bars,
)
from fxsplit_encoder.cli.document import Column, Document, columns
from fxsplit_encoder.compile.branches import Step
from fxsplit_encoder.compile.padding import PaddingReport
from fxsplit_encoder.compile.program import Program
from fxsplit_encoder.hugging_face.calls import is_named
from fxsplit_encoder.hugging_face.lifecycle import find_towers
from fxsplit_encoder.kernels.choice import Chooser, failing
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.family import Family
from fxsplit_encoder.models.load import read_family
from fxsplit_encoder.models.registry import FAMILIES
from fxsplit_encoder.planning.limits import Limits
from fxsplit_encoder.runtime.captured_program import Choosers

_SHOWN_OPERATORS = 3

_STEPS = columns(
    distinct="distinct",
    times="times",
    nodes="nodes",
    operators="most frequent operators but views",
    positions="positions",
    padding="padding",
)
_CAPTURES = [
    *columns(
        path="path", budget="budget", mode="mode", graphs="graphs", breaks="breaks", segments="segments"
    ),
    Column("bytes", "MiB", lambda num_bytes: "" if num_bytes is None else f"{num_bytes / 2**20:.1f}"),
]
_MICROSECONDS = Column(
    "microseconds",
    "microseconds",
    lambda times: ", ".join(f"{name} {time:.1f}" for name, time in times.items()),
)


class TracedPiece:
    """A piece that runs as traced and keeps its graph; as a piece compiler, the class itself."""

    def __init__(self, module: torch_fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.graph = module.graph
        self._forward = module.forward

    def __call__(self, *args: Any) -> Any:
        """The piece's results."""
        return self._forward(*args)


def run_inspect(tower: torch.nn.Module, family: Family, config: fx.EncoderConfig, document: Document) -> None:
    """Trace and split a tower, without compiling its pieces or capturing, and say what became of it.

    Raises:
        ConfigError: the settings do not suit the tower.
    """
    device = next(tower.parameters()).device
    document.facts({"tower": describe_tower(tower), "device": describe_device(device)})
    wrapped = family.wrap(tower)
    limits = fx.EncoderCudaGraphManager(wrapped, config).limits
    # A split is the same for every size. Two small ones tell which sizes vary, and take no time on a CPU.
    manager = fx.EncoderCudaGraphManager(
        wrapped,
        config.replace(
            token_budgets=(),
            paths=_small_budgets(wrapped, limits),
            max_items_per_batch=0,
            piece_compiler=TracedPiece,
        ),
    )
    with progress_bars() as bar:
        manager.compile(progress=bar("tracing"))
    for path in limits.path_budgets:
        bound = manager.programs[path]
        document.facts({"split": describe_split(path, bound)}, within=("programs", path))
        if bound is not None:
            declared = getattr(wrapped, "declares_padding", True)
            _say_program(document, path, bound.program, declared=declared)
    document.notes(manager.reports)
    _say_budgets(document, limits)


def say_towers(checkpoint: Checkpoint, document: Document) -> bool:
    """List the towers of a checkpoint's model as `fx.accelerate` sees them, without weights or a device.

    Returns:
        Whether the other commands know its tower too. Where they do not, InputError for a checkpoint that is
        no model of transformers either.
    """
    settings = checkpoint.read_json("config.json") or {}
    names = [*(settings.get("architectures") or ()), settings.get("model_type")]
    is_known = any(name in FAMILIES for name in names)
    kind: Any = None
    with contextlib.suppress(ImportError):  # a tower of a family of our own needs no transformers
        import transformers

        kind = getattr(transformers, str(names[0]), None)
    if kind is None:
        if not is_known:
            read_family(checkpoint)
        return is_known
    with torch.device("meta"), no_init_weights():
        model = kind(kind.config_class.from_dict(dict(settings)))
    try:
        found, refusals = find_towers(model)
    except fx.UnsupportedTowerError as error:
        document.notes([str(error)])
        return is_known
    rows = [[t.name, type(t.module).__name__, "by name" if is_named(t.module) else "by rule"] for t in found]
    rows += [[each.name, each.kind, f"no: {each.reason}"] for each in refusals]
    document.table("towers", columns(tower="tower", kind="class", served="accelerate serves it"), rows)
    document.say()
    return is_known


def _small_budgets(wrapped: Any, limits: Limits) -> dict[str, fx.PathConfig]:
    """Two budgets of every path: those of the settings may be of any size, the tower's own begin small."""
    own = fx.EncoderCudaGraphManager(wrapped).limits.path_budgets
    smallest = {path: min([own[path][0], *budgets[:1]]) for path, budgets in limits.path_budgets.items()}
    return {path: fx.PathConfig(token_budgets=(size, 2 * size)) for path, size in smallest.items()}


def _say_program(document: Document, path: str, program: Program, *, declared: bool) -> None:
    kinds = Counter(step.kind for step in program.steps)
    parts = f"{kinds['piece']} pieces, {kinds['split']} splitting ops, {kinds['host']} host ops"
    padding = _verdict(program.padding, declared)
    changed = ", ".join(f"{name} {places}" for name, places in program.pass_report.items())
    facts = {"steps": f"{len(program.steps)}: {parts}", "padding": padding, "passes": changed or "none"}
    document.facts(facts, within=("programs", path))
    rows: list[list[object]] = []
    for number in range(program.num_distinct):
        positions = [n for n, step in enumerate(program.pieces) if step.distinct == number]
        steps = [program.pieces[n] for n in positions]
        padding = _padding(program, steps)
        rows.append([f"piece {number}", len(steps), *_nodes(steps[0]), _ranges(positions), padding])
    for name in dict.fromkeys(operator_name(step.call) for step in program.splits):
        steps = [step for step in program.splits if operator_name(step.call) == name]
        rows.append(["splitting op", len(steps), None, name, None, _padding(program, steps)])
    document.say()
    document.table("steps_by_kind", _STEPS, rows, within=("programs", path))
    document.say()


def _verdict(padding: PaddingReport, declared: bool) -> str:
    """Whether padding is proved; if not, the first node at which it is not, and the line of code."""
    if padding.proved:
        return f"proved over {padding.num_nodes} nodes: no real row depends on pad rows"
    node, reason = padding.reasons[0]
    word = "declared by the tower, not proved" if declared else "not proved"
    return f"{word}: {node}: {reason}" + (f", at {padding.source}" if padding.source else "")


def _padding(program: Program, steps: Sequence[Step]) -> str:
    """Whether the rows of equal steps are proved independent; else at which node they are not, and why."""
    nodes = {node for step in steps for node in step.nodes}
    reasons = [f"{node}: {reason}" for node, reason in program.padding.reasons if node in nodes]
    if reasons:
        return "; ".join(reasons)
    if not nodes.isdisjoint(program.padding.mixed):
        return "reads rows that are not proved"
    return "proved" if program.padding.proved or program.padding.mixed else "not analyzed"


def _nodes(step: Step) -> tuple[int, str]:
    """How many nodes a piece has, and which operators that are no views are the most frequent."""
    assert isinstance(step.call, TracedPiece)
    graph = step.call.graph
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    operators = Counter(_short_name(target) for target in targets if not _is_view(target))
    shown = [f"{count} {name}" for name, count in operators.most_common(_SHOWN_OPERATORS)]
    return len(targets), ", ".join([*shown, *(["..."] if len(operators) > len(shown) else [])])


def _short_name(target: Any) -> str:
    return operator_name(target).removeprefix("aten::").split(".")[0]


def _is_view(target: Any) -> bool:
    schema = schema_of(target)
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


def _say_budgets(document: Document, limits: Limits) -> None:
    items, frames = limits.max_items_per_batch, limits.max_frames_per_batch
    document.content["max_items_per_batch"], document.content["max_frames_per_batch"] = items, frames
    document.say(f"A replay holds at most {items} items, {frames} video frames, and on each path:")
    rows = [
        [path, budget, segment_capacity(budget, max(items, frames))]
        for path, budgets in limits.path_budgets.items()
        for budget in budgets
    ]
    document.table("budgets", columns(path="path", budget="budget", segments="segments"), rows)


# --- what a machine makes of it


def say_captures(wrapped: fx.SupportsEncoderCudaGraph, config: fx.EncoderConfig, document: Document) -> None:
    """Capture a tower as `config` says, and list every capture: its mode, graphs, eager breaks and bytes.
    A budget's bytes are those of its captures together.
    """
    manager = fx.EncoderCudaGraphManager(wrapped, config)
    with progress_bars() as bar:
        manager.compile(progress=bar("compiling"))
        manager.capture(progress=bar("capturing"))
    rows = []
    for name, path in manager.paths.items():
        for budget, captured in sorted(path.captured.items()):
            rows.append([name, budget, *_figures(captured), path.ladder.num_bytes(budget)])
            if one := path.ladder.captured_single_segment.get(budget):
                rows.append([name, f"{budget}, one image", *_figures(one), None])
    document.say()
    document.table("captures", _CAPTURES, rows)
    later = [
        name for name, path in manager.paths.items() if path.recurring_counts == "hits" and not path.captured
    ]
    notes = [f"{name}: token counts are captured when they come, at their exact size" for name in later]
    document.notes([*manager.reports, *notes])
    manager.clear()


def _figures(captured: CapturedForward) -> tuple[str, int, int, int]:
    capture = captured.capture
    return captured.mode, capture.num_graphs, capture.num_eager_breaks, len(capture.segments)


class KernelReport(NamedTuple):
    """A kernel and the classes of calls that it computes."""

    name: str
    unavailable: str | None
    chosen: tuple[str, ...]
    failed: str | None = None
    """What it raises there, of `failing`."""


class ClassReport(NamedTuple):
    """A measured class of calls: microseconds by kernel, and why others may not be chosen."""

    shape: str
    chosen: str
    pinned: bool
    microseconds: Mapping[str, float]
    rejected: Mapping[str, str]


class OperationReport(NamedTuple):
    """All kernels of an operation, in order of preference, and all classes, by their size."""

    kernels: tuple[KernelReport, ...]
    classes: tuple[ClassReport, ...]


def describe(device: torch.device, chooser: Chooser[Any, Any]) -> OperationReport:
    """The measurements of an operation on a device, and the choices by them."""
    table = chooser.measurements.table(device)
    classes = []
    for shape in sorted(table, key=lambda s: (str(s.dtype), s.kind(), s.extents())):
        found = table[shape]
        chosen, pinned = chooser.ranking(shape)[0].name, chooser.pinned(shape) is not None
        classes.append(ClassReport(str(shape), chosen, pinned, found.microseconds, found.rejected))
    failed = failing(table)
    kernels = tuple(
        KernelReport(
            kernel.name,
            kernel.unavailable_reason(device),
            tuple(each.shape for each in classes if each.chosen == kernel.name),
            failed.get(kernel.name),
        )
        for kernel in chooser.measurements.kernels
    )
    return OperationReport(kernels, tuple(classes))


def say_kernels(device: torch.device, config: fx.EncoderConfig, document: Document) -> None:
    """List which kernels of attention and of linear layers work on a device, and which was chosen for every
    class of calls that was measured there, now or by an earlier process.
    """
    for chooser in Choosers.of(config).all:
        _say_operation(chooser.measurements.shape.operation, describe(device, chooser), document)


def _say_operation(operation: str, report: OperationReport, document: Document) -> None:
    document.say()
    rows = [[k.name, k.unavailable or k.failed or "works", len(k.chosen)] for k in report.kernels]
    headers = columns(kernel=f"{operation} kernel", state="on this device", classes="chosen for classes")
    document.table(f"{operation}_kernels", headers, rows)
    if report.classes:
        document.say()
        document.table(
            f"{operation}_classes",
            [*columns(shape="class of calls", chosen="chosen", how=""), _MICROSECONDS],
            [
                [each.shape, each.chosen, "pinned" if each.pinned else "measured", dict(each.microseconds)]
                for each in report.classes
            ],
        )
