"""What a forward raises while it is captured, as an error of this library that says where."""

from __future__ import annotations

import traceback
from types import TracebackType

from torch import OutOfMemoryError, nn

from fxsplit_encoder.errors import CaptureError, CaptureMemoryError, FxSplitError


def capture_failure(error: Exception, what: str, running: str | None) -> FxSplitError:
    """The error of this library for what a forward raised while it was captured.

    Args:
        what: what was captured, for the message.
        running: the op or piece that was called last.
    """
    place = _place(error.__traceback__, running)
    if isinstance(error, OutOfMemoryError):
        _release_locals(error.__traceback__)
        return CaptureMemoryError(f"out of memory while capturing {what}{place}: {error}")
    if isinstance(error, FxSplitError) and not isinstance(error, CaptureError):
        return error
    reason = str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}"
    return CaptureError(f"capturing {what} failed{place}: {reason}")


def _release_locals(frames: TracebackType | None) -> None:
    """Lets go of what the frames hold, which whoever keeps the error would keep."""
    traceback.clear_frames(frames)
    for frame, _ in traceback.walk_tb(frames):
        # Before Python 3.13 a frame keeps the dictionary that was asked of it; asking again empties it.
        _ = frame.f_locals


def _place(frames: TracebackType | None, running: str | None) -> str:
    modules = [
        frame.f_locals["self"]
        for frame, _ in traceback.walk_tb(frames)
        if isinstance(frame.f_locals.get("self"), nn.Module)
    ]
    place = f" at {running}" if running is not None else ""
    if not modules:
        return place
    root, innermost = modules[0], modules[-1]
    name = next((name for name, module in root.named_modules() if module is innermost), "")
    return f"{place} in {type(innermost).__name__}" + (f" ({name})" if name else "")
