"""`encoder-cg inspect`: how a tower is split and captured, which pieces may be padded, and its kernels."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import fxsplit_encoder as fx
from fxsplit_encoder._torch.transformers import no_init_weights
from fxsplit_encoder.capture.forward import CapturedForward
from fxsplit_encoder.capture.inputs import segment_capacity
from fxsplit_encoder.cli.console import (
    capture,
    describe_device,
    describe_split,
    describe_tower,
    operator_name,
    progress_bars,
)
from fxsplit_encoder.cli.document import Document, mebibytes
from fxsplit_encoder.compile.branches import Step
from fxsplit_encoder.compile.padding import PaddingReport
from fxsplit_encoder.compile.program import Program
from fxsplit_encoder.hugging_face.lifecycle import find_towers
from fxsplit_encoder.hugging_face.rules import is_named
from fxsplit_encoder.kernels.choice import Chooser, failing
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.family import Family
from fxsplit_encoder.models.load import read_family
from fxsplit_encoder.models.registry import FAMILIES
from fxsplit_encoder.planning.limits import Limits
from fxsplit_encoder.runtime.captured_program import Choosers


def run_inspect(tower: torch.nn.Module, family: Family, config: fx.EncoderConfig, document: Document) -> None:
    """Traces and splits a tower, without compiling its pieces or capturing, and says what became of it.
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
            piece_compiler="eager",
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
    """Lists the towers of a checkpoint's model as `fx.accelerate` sees them, without weights or a device;
    returns whether the other commands know its tower too. InputError: nor is it a model of transformers.
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
    rows = [
        {
            "tower": each.name,
            "kind": type(each.module).__name__,
            "served": "by name" if is_named(each.module) else "by rule",
        }
        for each in found
    ]
    rows += [{"tower": each.name, "kind": each.kind, "served": f"no: {each.reason}"} for each in refusals]
    document.table("towers", rows, {"kind": "class", "served": "accelerate serves it"})
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
    equal: dict[str, list[Step]] = {f"piece {number}": [] for number in range(program.num_distinct)}
    for step in program.pieces:
        equal[f"piece {step.distinct}"].append(step)
    for step in program.splits:
        equal.setdefault(f"splitting op {operator_name(step.call)}", []).append(step)
    rows = []
    for name, steps in equal.items():
        sizes = {"times": len(steps), "nodes": len(steps[0].nodes)}
        rows.append({"distinct": name, **sizes, "padding": _padding(program, steps)})
    document.say()
    document.table("steps_by_kind", rows, within=("programs", path))
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


def _say_budgets(document: Document, limits: Limits) -> None:
    items, frames = limits.max_items_per_batch, limits.max_frames_per_batch
    document.content["max_items_per_batch"], document.content["max_frames_per_batch"] = items, frames
    document.say(f"A replay holds at most {items} items, {frames} video frames, and on each path:")
    rows = [
        {"path": path, "budget": budget, "segments": segment_capacity(budget, max(items, frames))}
        for path, budgets in limits.path_budgets.items()
        for budget in budgets
    ]
    document.table("budgets", rows)


# --- what a machine makes of it


def say_captures(wrapped: fx.SupportsEncoderCudaGraph, config: fx.EncoderConfig, document: Document) -> None:
    """Capture a tower as `config` says, and list every capture: its mode, graphs, eager breaks and bytes.
    A budget's bytes are those of its captures together.
    """
    manager = fx.EncoderCudaGraphManager(wrapped, config)
    capture(manager)
    rows: list[dict[str, Any]] = []
    for name, path in manager.paths.items():
        for budget, captured in sorted(path.captured.items()):
            num_bytes = path.ladder.num_bytes(budget)
            rows.append({"path": name, "budget": budget, **_figures(captured), "bytes": num_bytes})
            if one := captured.for_one_segment:
                rows.append({"path": name, "budget": f"{budget}, one image", **_figures(one), "bytes": None})
    document.say()
    document.table("captures", rows, {"bytes": "MiB"}, {"bytes": mebibytes})
    later = [
        name for name, path in manager.paths.items() if path.recurring_counts == "hits" and not path.captured
    ]
    notes = [f"{name}: token counts are captured when they come, at their exact size" for name in later]
    document.notes([*manager.reports, *notes])
    manager.clear()


def _figures(captured: CapturedForward) -> dict[str, Any]:
    made = captured.capture
    counts = {"graphs": made.num_graphs, "breaks": made.num_eager_breaks, "segments": len(made.segments)}
    return {"mode": captured.mode, **counts}


def say_kernels(device: torch.device, config: fx.EncoderConfig, document: Document) -> None:
    """List which kernels of attention and of linear layers work on a device, and which was chosen for every
    class of calls that was measured there, now or by an earlier process.
    """
    for chooser in Choosers.of(config).all:
        operation = chooser.measurements.shape.operation
        document.say()
        headers = {
            "kernel": f"{operation} kernel",
            "state": "on this device",
            "classes": "chosen for classes",
        }
        document.table(f"{operation}_kernels", kernel_rows(device, chooser), headers)
        if classes := class_rows(device, chooser):
            document.say()
            headers, formats = {"shape": "class of calls", "how": ""}, {"microseconds": _times}
            document.table(f"{operation}_classes", classes, headers, formats)


def kernel_rows(device: torch.device, chooser: Chooser[Any, Any]) -> list[dict[str, Any]]:
    """The kernels of an operation, in order of preference: whether each works, and how often it is chosen."""
    table = chooser.measurements.table(device)
    chosen = Counter(chooser.ranking(shape)[0].name for shape in table)
    failed = failing(table)
    return [
        {
            "kernel": kernel.name,
            "state": kernel.unavailable_reason(device) or failed.get(kernel.name) or "works",
            "classes": chosen[kernel.name],
        }
        for kernel in chooser.measurements.kernels
    ]


def class_rows(device: torch.device, chooser: Chooser[Any, Any]) -> list[dict[str, Any]]:
    """The measured classes of calls, by their size: the chosen kernel, and microseconds by kernel."""
    table = chooser.measurements.table(device)
    return [
        {
            "shape": str(shape),
            "chosen": chooser.ranking(shape)[0].name,
            "how": "measured" if chooser.pinned(shape) is None else "pinned",
            "microseconds": dict(table[shape].microseconds),
        }
        for shape in sorted(table, key=lambda s: (str(s.dtype), s.kind(), s.extents()))
    ]


def _times(microseconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {time:.1f}" for name, time in microseconds.items())
