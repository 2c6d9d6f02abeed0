"""What `encoder-cg inspect` shows of a machine: a tower's captures, and the choice of attention kernels."""

from __future__ import annotations

import torch

import fxsplit_encoder as fx
from fxsplit_encoder.attention import KernelChooser, describe
from fxsplit_encoder.capture import CapturedForward
from fxsplit_encoder.cli.console import print_facts, print_table, progress_bars


def print_captures(wrapped: fx.SupportsEncoderCudaGraph, config: fx.EncoderConfig) -> None:
    """Capture a tower as `config` says, and print every capture: its mode, graphs, eager breaks and bytes.
    A budget's bytes are those of its captures together.
    """
    manager = fx.EncoderCudaGraphManager(wrapped, config)
    with progress_bars() as bar:
        manager.compile(progress=bar("compiling"))
        manager.capture(progress=bar("capturing"))
    rows = []
    for name, path in manager.paths.items():
        for budget, captured in sorted(path.captured.items()):
            rows.append([name, budget, *_figures(captured), path.ladder.num_bytes(budget) / 2**20])
            if one := path.ladder.captured_one_segment.get(budget):
                rows.append([name, f"{budget}, one image", *_figures(one), None])
    print()
    print_table(["path", "budget", "mode", "graphs", "breaks", "segments", "MiB"], rows)
    later = [name for name, path in manager.paths.items() if path.exact is not None and not path.captured]
    notes = [f"{name}: token counts are captured when they come, at their exact size" for name in later]
    for note in [*manager.reports, *notes]:
        print_facts({"note": note})
    manager.clear()


def _figures(captured: CapturedForward) -> tuple[str, int, int, int]:
    capture = captured.capture
    return captured.mode, capture.num_graphs, capture.num_eager_breaks, len(capture.segments)


def print_attention(device: torch.device, config: fx.EncoderConfig) -> None:
    """Print which attention kernels work on a device, and which was chosen for every class of shapes that was
    measured there, now or by an earlier process.
    """
    report = describe(device, KernelChooser(config.attention))
    print()
    rows = [[k.name, k.unavailable or "works", len(k.chosen)] for k in report.kernels]
    print_table(["attention kernel", "on this device", "chosen for classes"], rows)
    if report.classes:
        print()
        headers = ["class of shapes", "chosen", "", "microseconds"]
        print_table(
            headers,
            [
                [
                    *(each.shape, each.chosen, "pinned" if each.pinned else "measured"),
                    ", ".join(f"{name} {time:.1f}" for name, time in each.microseconds.items()),
                ]
                for each in report.classes
            ],
        )
