"""What a call costs Python, counted: unlike a time, it is the same on every machine and under any load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def instructions(call: Callable[[], object]) -> int:
    """The bytecode instructions that `call` takes; what it does inside C functions counts as one.

    Versions of Python compile to other instructions: by some tens of percent more or less.
    """
    return _monitored(call) if sys.version_info >= (3, 12) else _traced(call)


def _monitored(call: Callable[[], object]) -> int:
    count = 0

    def add(code: object, offset: int) -> None:
        nonlocal count
        count += 1

    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    tool, events = monitoring.PROFILER_ID, monitoring.events
    monitoring.use_tool_id(tool, "instructions")
    monitoring.register_callback(tool, events.INSTRUCTION, add)
    monitoring.set_events(tool, events.INSTRUCTION)
    try:
        call()
    finally:
        monitoring.set_events(tool, events.NO_EVENTS)
        monitoring.register_callback(tool, events.INSTRUCTION, None)
        monitoring.free_tool_id(tool)
    return count


def _traced(call: Callable[[], object]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def python_calls(call: Callable[[], object]) -> int:
    """The calls of Python functions that `call` makes, its own included; what C functions do is none."""
    count = 0

    def add(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(add)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count
