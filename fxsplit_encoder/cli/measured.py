"""What `encoder-cg inspect` shows of a machine: a tower's captures, and the choice of attention kernels."""

from __future__ import annotations

import torch

import fxsplit_encoder as fx
from fxsplit_encoder.attention import KernelChooser, describe
from fxsplit_encoder.cli.console import print_facts, print_table, progress_bars


def print_captures(wrapped: fx.SupportsEncoderCudaGraph, config: fx.EncoderConfig) -> None:
    """Capture a tower as `config` says, and print every capture: its mode, graphs, eager breaks and bytes."""
    manager = fx.EncoderCudaGraphManager(wrapped, config)
    with progress_bars() as bar:
        manager.compile(progress=bar("compiling"))
        manager.capture(progress=bar("capturing"))
    rows = []
    for name, path in manager.paths.items():
        for budget, captured in sorted(path.captured.items()):
            capture, num_bytes = captured.capture, path.ladder.num_bytes(budget)
            counts = (capture.num_graphs, capture.num_eager_breaks, len(capture.segments))
            rows.append([name, budget, captured.mode, *counts, num_bytes / 2**20])
    print()
    print_table(["path", "budget", "mode", "graphs", "breaks", "segments", "MiB"], rows)
    for report in manager.reports:
        print_facts({"note": report})
    manager.clear()


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
