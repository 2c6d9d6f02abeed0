"""Call stacks, as they are when a tiny tower is captured and replayed on a CPU.

Frames are counted where they belong to this package; comprehensions, which have frames in Python 3.11 alone,
are not. Where there is CUDA the same calls lie above a graph.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest import mock

import fxsplit_encoder as fx
from fxsplit_encoder.capture.segmented import SegmentedCapture
from fxsplit_encoder.models.random import draw_weights, random_inputs
from house.imports import height_of, read_floors
from house.measure import PACKAGE, Measure

MODES = ("full", "piecewise")
"""Each is captured and replayed; the deepest stack of all counts."""
_NO_FUNCTIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


class Frame(NamedTuple):
    """A call on the stack."""

    module: str
    function: str
    code: CodeType


Stack = tuple[Frame, ...]
"""Outermost first."""


def measure_calls() -> list[Measure]:
    """Hops to a replay, and depth and climbs of the stack on which pieces are recorded."""
    with _watched("replay") as replays, _watched("captured") as recordings:
        for mode in MODES:
            capture_and_execute(mode)
    manager = fx.EncoderCudaGraphManager
    replay = _deepest(replays, manager.execute)
    recordings = [stack for stack in (_from(stack, manager.capture) for stack in recordings) if stack]
    recording = max(recordings, key=len)
    climbs = _climbs(recordings)
    # A stack ends with `SegmentedCapture.replay`, which calls the replay of the graph: one hop a frame.
    return [
        Measure("hops from execute to the graph's replay", len(replay), 6, items=_lines(replay)),
        Measure("frames from capture to a piece's recording", len(recording), 12, items=_lines(recording)),
        Measure("climbs on that stack", len(climbs), 0, items=climbs),
    ]


def capture_and_execute(mode: str) -> None:
    """Takes a tiny tower through `capture` and one `execute`, of one image and of two."""
    wrapped = fx.wrap(_tiny_tower())
    config = fx.EncoderConfig(mode=mode, token_budgets=(16,), max_items_per_batch=2, max_frames_per_batch=0)
    manager = fx.EncoderCudaGraphManager(wrapped, config, log_interval=0)
    manager.capture()
    for sizes in ([16], [16, 32]):  # patches, four a token
        manager.execute(random_inputs(wrapped, sizes))
    manager.clear()


def _tiny_tower() -> Any:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    config = Qwen3VLVisionConfig(
        depth=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        out_hidden_size=96,
        deepstack_visual_indexes=[1],
    )
    tower = Qwen3VLVisionModel(config).requires_grad_(False).train(False)
    draw_weights(tower, seed=0)
    return tower


@contextlib.contextmanager
def _watched(method: str) -> Iterator[list[Stack]]:
    """Collects the stack of every call of a method of `SegmentedCapture`, that call included."""
    original = getattr(SegmentedCapture, method)
    own = Frame(SegmentedCapture.__module__, original.__qualname__, original.__code__)
    stacks: list[Stack] = []

    @functools.wraps(original)
    def watching(*args: Any, **kwargs: Any) -> Any:
        stacks.append((*_stack(), own))
        return original(*args, **kwargs)

    with mock.patch.object(SegmentedCapture, method, watching):
        yield stacks


def _stack() -> Stack:
    frames: list[Frame] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        code = frame.f_code
        if module.partition(".")[0] == PACKAGE and code.co_name not in _NO_FUNCTIONS:
            frames.append(Frame(module, code.co_qualname, code))
        frame = frame.f_back
    return tuple(reversed(frames))


def _from(stack: Stack, function: Callable[..., Any]) -> Stack:
    """The part of a stack from a function on; empty where it was not called."""
    code = inspect.unwrap(function).__code__
    starts = (index for index, frame in enumerate(stack) if frame.code is code)
    return stack[next(starts, len(stack)) :]


def _deepest(stacks: list[Stack], function: Callable[..., Any]) -> Stack:
    """The longest of the stacks, from a function on.

    Raises:
        LookupError: it is on none of them.
    """
    deepest = max((_from(stack, function) for stack in stacks), key=len, default=())
    if not deepest:
        raise LookupError(f"{function.__qualname__} was called, but reached none of the watched calls")
    return deepest


def _climbs(stacks: list[Stack]) -> tuple[str, ...]:
    """Calls from a floor to one above it, each once."""
    floors = read_floors()
    climbs = {
        f"{_name(caller)} -> {_name(called)}": None
        for stack in stacks
        for caller, called in itertools.pairwise(stack)
        if height_of(caller.module, floors) < height_of(called.module, floors)
    }
    return tuple(climbs)


def _name(frame: Frame) -> str:
    return f"{frame.module.removeprefix(f'{PACKAGE}.')}: {frame.function}"


def _lines(stack: Stack) -> tuple[str, ...]:
    return tuple(map(_name, stack))
