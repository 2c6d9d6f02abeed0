"""`encoder-cg build`: a file with which managers start without compiling and without measuring."""

from __future__ import annotations

import time
from pathlib import Path

import fxsplit_encoder as fx
from fxsplit_encoder.cli.console import capture, say_tower
from fxsplit_encoder.cli.document import Document
from fxsplit_encoder.cli.tower import ChosenTower


def run_build(chosen: ChosenTower, config: fx.EncoderConfig, output: Path, document: Document) -> None:
    """Compile and capture a tower as `config` says, and save what was found.

    Raises:
        InputError: nothing is captured, so that there is nothing to save.
    """
    if not config.enabled:
        raise fx.InputError("--config: enabled: false captures nothing, so there is nothing to save")
    say_tower(document, chosen)
    # What an older file knows is not what this one is to know.
    config = config.replace(start_file=None)
    manager = fx.EncoderCudaGraphManager(chosen.family.wrap(chosen.module), config)
    begin = time.perf_counter()
    capture(manager)
    seconds = time.perf_counter() - begin
    document.notes(manager.reports)
    if not manager.can_replay():
        raise fx.InputError("nothing could be captured, so there is nothing to save: see the notes")
    num_bytes = manager.save_start(output)
    captured = {name: sorted(path.captured) for name, path in manager.paths.items()}
    document.content["budgets"] = captured
    document.content["seconds"] = round(seconds, 1)
    for name, budgets in captured.items():
        document.say(f"{'path':<8} {name}: budgets {', '.join(map(str, budgets)) or 'none'}")
    if chosen.device.type != "cuda":
        document.notes(["no GPU: nothing was measured, and on GPUs this file is refused"])
    document.put("file", str(output), f"\nwrote {output}, {num_bytes / 2**20:.1f} MiB, in {seconds:.1f} s")
