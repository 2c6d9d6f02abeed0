"""cuDNN's plans as files in this library's cache directory. They are code, so only a directory that nobody
else can write is read.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from fxsplit_encoder.kernels.store import (
    cache_directory,
    describe_environment,
    digest_of,
    why_not_private,
    write_atomic,
)

logger = logging.getLogger(__name__)

MOST_FILES = 1024
"""In one directory, of some 92 kB each: every shape has one, and a service may meet any number of shapes."""

MOST_KEPT = 256
"""In memory."""

_DIGEST_BYTES = hashlib.sha256().digest_size

_lock = threading.Lock()
_kept: dict[str, bytes] = {}
_captured: set[str] = set()


def read_plan(name: str, device: torch.device) -> bytes | None:
    """A plan that a process on such a device has built; None: there is none, or it is damaged."""
    if (content := _kept.get(name)) is not None:
        return content
    directory = _directory(device)
    if directory is None:
        return None
    try:
        stored = (directory / name).read_bytes()
    except OSError:
        return None
    digest, content = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        logger.warning("%s is damaged, so the plan is built anew", directory / name)
        return None
    _keep(name, content)
    return content


def write_plan(name: str, content: bytes, device: torch.device) -> None:
    """Keeps a plan in memory and on disk; a directory that is full or cannot be written is no error."""
    _keep(name, content)
    directory = _directory(device)
    if directory is None:
        return
    try:
        if sum(1 for _ in os.scandir(directory)) >= MOST_FILES:
            logger.debug("%s is full: a plan is kept in memory only", directory)
            return
        write_atomic(directory / name, hashlib.sha256(content).digest() + content)
    except OSError as error:
        logger.debug("a plan of cuDNN's is kept in memory only: %s", error)


def forget_plan(name: str) -> None:
    """Has a plan built anew that cuDNN does not take."""
    with _lock:
        _kept.pop(name, None)


def note_capture(name: str) -> None:
    """A captured graph holds the kernels of this plan, so that a start from a file will want it."""
    _captured.add(name)


def captured_plans() -> dict[str, bytes]:
    """The plans that captures hold and that are in memory, by name."""
    with _lock:
        return {name: _kept[name] for name in sorted(_captured) if name in _kept}


def restore_plans(plans: Mapping[str, bytes]) -> None:
    """Keeps plans in memory, where `read_plan` finds them."""
    for name, content in plans.items():
        _keep(name, content)


def _keep(name: str, content: bytes) -> None:
    with _lock:
        if len(_kept) >= MOST_KEPT and (oldest := next((n for n in _kept if n not in _captured), None)):
            del _kept[oldest]
        _kept[name] = content


@functools.cache
def _directory(device: torch.device) -> Path | None:
    """Where the plans for such devices and versions are; None: they are kept in memory only."""
    directory = cache_directory() / "cudnn" / digest_of(describe_environment(device))
    if problem := why_not_private(directory):
        logger.debug("plans of cuDNN's are kept in memory only: %s: %s", directory, problem)
        return None
    return directory
