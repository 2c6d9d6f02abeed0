"""FlashAttention 4's variants compiled in processes of their own, while this one traces and compiles.

The package compiles a variant when it is first called, for seconds of this process. Where its cache on disk
is on, as it is by default (`flash_cache`), the same can be done before, on other cores and without a device;
the first call then loads what it finds there.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import IO

import torch

from fxsplit_encoder.attention.kernels.flash_cache import switch_on
from fxsplit_encoder.kernels.base import capability, processors

logger = logging.getLogger(__name__)

Job = tuple[str, int, str]
"""A kernel's name, the width of heads, and a dtype's name."""

_MODULE = "fxsplit_encoder.attention.kernels.ahead_process"

# The architecture that the package's compiler names for a capability: of Hopper this is known.
_TARGETS = {(9, 0): ("sm_90", "sm_90a")}

# Fewer processors are wanted by what this process does meanwhile.
_FEWEST_PROCESSORS = 4

# A process imports torch and the package, and compiles for seconds. What is not ready then is compiled here.
_LONGEST_WAIT = 60.0

_lock = threading.Lock()
_asked: set[Job] = set()


@dataclass(slots=True)
class _Process:
    popen: subprocess.Popen[str]
    errors: IO[str]
    jobs: list[Job] = field(default_factory=list)

    def give(self, job: Job) -> None:
        assert self.popen.stdin is not None
        self.jobs.append(job)
        self.popen.stdin.write(json.dumps(job) + "\n")
        self.popen.stdin.flush()

    def end(self, seconds: float) -> None:
        """Lets it do what it was given, for so long at most."""
        try:
            self.popen.communicate(timeout=seconds if self.jobs else 0)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.communicate()
        if self.jobs and self.popen.returncode:
            self.errors.seek(0)
            said = self.errors.read().strip().splitlines()
            why = said[-1] if said else f"status {self.popen.returncode}"
            logger.warning("not compiled ahead: %s: %s", self.jobs, why)
        self.errors.close()


_processes: list[_Process] = []


def why_not(device: torch.device) -> str:
    """Why nothing is compiled ahead for a device; empty: it can be."""
    if device.type != "cuda" or capability(device) not in _TARGETS:
        return "no GPU for which the package's compiler is known to need no device"
    if (os.cpu_count() or 1) < _FEWEST_PROCESSORS:
        return f"fewer than {_FEWEST_PROCESSORS} processors"
    try:
        metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return "flash-attn-4 is not installed"
    return switch_on()


def warm_up(number: int, device: torch.device) -> None:
    """Starts so many processes, which import the package meanwhile and wait for what `start` gives them."""
    if why_not(device):
        return
    with _lock:
        while len(_processes) < number:
            _processes.append(_launch(device))


def start(names: Sequence[str], head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Begins to compile the kernels of these names for heads so wide, each in a process of its own. What was
    asked for before is not begun again.
    """
    if reason := why_not(device):
        logger.debug("attention kernels are compiled when they are called: %s", reason)
        return
    with _lock:
        for name in names:
            job = (name, head_dim, str(dtype).removeprefix("torch."))
            if job in _asked:
                continue
            _asked.add(job)
            try:
                idle = next((each for each in _processes if not each.jobs), None)
                if idle is None:
                    _processes.append(idle := _launch(device))
                idle.give(job)
            except OSError as error:  # no process can be started, or it has ended: it is compiled here
                logger.warning("not compiled ahead: %s: %s", job, error)


def _launch(device: torch.device) -> _Process:
    kind, target = _TARGETS[capability(device)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "CUDA_VISIBLE_DEVICES": "",  # it takes neither memory nor time of the device
        "FLASH_ATTENTION_ARCH": kind,
        "CUTE_DSL_ARCH": target,
        "FLASH_ATTENTION_NUM_SMS": str(processors(device)),
    }
    errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
    # -P: nothing is imported from the directory that the process happens to be in.
    popen = subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env=environment,
        text=True,
    )
    return _Process(popen, errors)


def is_running() -> bool:
    """Whether there are processes that nobody has waited for."""
    return bool(_processes)


def dismiss() -> None:
    """Ends the processes that were given nothing."""
    with _lock:
        for each in [each for each in _processes if not each.jobs]:
            each.end(0)
            _processes.remove(each)


def wait() -> None:
    """Waits until all that was begun is compiled. What fails is compiled where it is called, as ever."""
    with _lock:
        begin = time.monotonic()
        while _processes:
            _processes[0].end(max(0.0, begin + _LONGEST_WAIT - time.monotonic()))
            _processes.pop(0)


def _end_all() -> None:
    for each in _processes:
        each.popen.kill()


atexit.register(_end_all)
