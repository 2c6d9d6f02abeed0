"""Print progress bars, devices, and descriptions of towers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fxsplit_encoder.cli.document import Document
from fxsplit_encoder.cli.tower import ChosenTower
from fxsplit_encoder.compile.program import BoundProgram
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.manager import EncoderCudaGraphManager

Update = Callable[[int, int], None]
"""Takes what is done, and how much there is in total."""


@contextmanager
def progress_bars() -> Iterator[Callable[[str], Update]]:
    """Bars on stderr; calling the result with a description adds one and returns what moves it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def add(description: str) -> Update:
            task = progress.add_task(f"{description:<10}", total=None)
            return lambda done, total: progress.update(task, completed=done, total=total)

        yield add
        for task in list(progress.tasks):
            if task.total is None:
                progress.remove_task(task.id)


def capture(manager: EncoderCudaGraphManager) -> None:
    """Compiles and captures behind two bars."""
    with progress_bars() as bar:
        manager.compile(progress=bar("compiling"))
        manager.capture(progress=bar("capturing"))


def say_tower(document: Document, chosen: ChosenTower) -> None:
    """Whose tower runs, its size, and where."""
    tower = f"{chosen.title}, {describe_tower(chosen.module)}"
    document.facts({"tower": tower, "device": describe_device(chosen.device)})


def describe_device(device: torch.device) -> str:
    """The device and torch's version, in words."""
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else f"CPU, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"


def describe_replay(device: torch.device, config: EncoderConfig) -> str:
    """Describes a replay on this device, and whether its time is meaningful."""
    if not config.enabled or config.mode == "none":
        return "none: nothing is captured, every batch runs at its exact shape"
    if device.type == "cuda":
        return "CUDA graphs"
    return "no GPU: recorded steps are replayed without CUDA graphs; no times, they would say nothing"


def describe_tower(tower: torch.nn.Module) -> str:
    """Depth, width, size and dtype of a tower."""
    parameters = sum(parameter.numel() for parameter in tower.parameters())
    dtype = str(next(tower.parameters()).dtype).removeprefix("torch.")
    stacks = " and ".join(_describe_stack(config) for config in _stacks(tower))
    return f"{stacks}, {parameters / 1e6:.0f} M parameters, {dtype}"


def _stacks(tower: Any) -> list[Any]:
    """The configurations of its stacks of blocks."""
    inner = next((getattr(tower, n) for n in ("vision_tower", "vision_model") if hasattr(tower, n)), tower)
    config: Any = getattr(inner, "config", None) or tower.config
    return [config.sam, config.clip] if hasattr(config, "clip") else [config]


def _describe_stack(config: Any) -> str:
    names = ("depth", "num_hidden_layers", "num_layers")
    blocks = next(getattr(config, name) for name in names if hasattr(config, name))
    # Where there is an `embed_dim`, it is the width of the blocks, and `hidden_size` the language model's.
    return f"{blocks} blocks, width {getattr(config, 'embed_dim', config.hidden_size)}"


def describe_split(path: str, bound: BoundProgram | None) -> str:
    """Where a path's program was split, in a line."""
    where = "" if path == "default" else f"{path}: "
    if bound is None:
        return f"{where}none, this path runs eagerly"
    program = bound.program
    cuts = Counter(operator_name(step.call) for step in program.splits)
    at = ", ".join(f"{count} x {name}" for name, count in cuts.items()) or "nothing"
    return f"{where}{len(program.pieces)} pieces, {program.num_distinct} distinct, cut at {at}"


def operator_name(call: Any) -> str:
    """An operator as the configuration writes it."""
    return str(call.name()).removesuffix(".default") if hasattr(call, "name") else str(call)
