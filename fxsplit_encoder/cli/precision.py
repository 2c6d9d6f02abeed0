"""`encoder-cg inspect --precision`: what fp8 adds to a tower's results, layer by layer, and what it gains."""

from __future__ import annotations

import fxsplit_encoder as fx
from fxsplit_encoder.capture import measure_ms
from fxsplit_encoder.cli.console import progress_bars
from fxsplit_encoder.cli.document import Document, columns

_LAYERS = columns(
    path="path", layer="layer", inputs="inputs", outputs="outputs", error="error", runs="runs in"
)
_TOWER = columns(
    path="path", own="error without fp8", fp8="error with fp8", layers="layers", kept="not in fp8"
)
_TIMES = columns(path="path", budget="budget", own="ms without fp8", fp8="ms with fp8")


def say_precision(wrapped: fx.SupportsEncoderCudaGraph, config: fx.EncoderConfig, document: Document) -> None:
    """List the error that each layer adds in fp8 and in what it runs, then the tower's errors; on a GPU also
    the time of every budget's replay without fp8 and with it. Errors are relative to float32.

    Raises:
        ConfigError: the device or the tower's dtype cannot take fp8.
    """
    default = fx.EncoderConfig.model_fields["fp8_max_error"].default
    limit = config.fp8_max_error if config.fp8_max_error is not None else default
    manager = fx.EncoderCudaGraphManager(wrapped, config.replace(precision="fp8", fp8_max_error=limit))
    with progress_bars() as bar:
        manager.compile(progress=bar("compiling in fp8"))
    layers: list[list[object]] = []
    towers: list[list[object]] = []
    for path in manager.paths_by_key.values():
        report = path.forward.precision
        if report is None:
            continue
        for number, layer in enumerate(report.layers):
            name, runs = layer.name or f"layer {number}", "own dtype" if layer.is_kept else "fp8"
            error = f"{layer.error:.2g}"
            layers.append([path.label, name, layer.in_features, layer.out_features, error, runs])
        errors = [f"{report.own:.2g}", f"{report.fp8:.2g}"]
        towers.append([path.label, *errors, len(report.layers), len(report.kept)])
    if layers:
        document.say()
        document.table("precision_layers", _LAYERS, layers)
    document.say()
    document.table("precision", _TOWER, towers)
    notes = [*manager.reports, f"fp8_max_error: {limit}"]
    if manager.device.type == "cuda":
        document.say()
        _say_times(wrapped, config.replace(precision="auto"), manager, document)
    else:
        notes.append("times are not shown: on a CPU they say nothing of fp8")
    document.notes(notes)
    manager.clear()


def _say_times(
    wrapped: fx.SupportsEncoderCudaGraph,
    own: fx.EncoderConfig,
    in_fp8: fx.EncoderCudaGraphManager,
    document: Document,
) -> None:
    plain = fx.EncoderCudaGraphManager(wrapped, own)
    rows: list[list[object]] = []
    for manager in (plain, in_fp8):
        manager.capture()
    for key, path in plain.paths_by_key.items():
        others = in_fp8.paths_by_key[key].captured
        for budget, captured in sorted(path.captured.items()):
            if budget in others:
                both = [measure_ms(each.replay, plain.device) for each in (captured, others[budget])]
                rows.append([path.label, budget, *(f"{ms:.3f}" for ms in both)])
    document.table("precision_times", _TIMES, rows)
    plain.clear()
