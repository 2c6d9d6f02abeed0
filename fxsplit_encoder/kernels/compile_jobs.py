"""Compile variants of FlashAttention 4 and QuACK in other processes, while this one traces.

The packages compile a variant for seconds when it is first called; with their cache on disk, a call loads it.
Their own directories are temporary ones, where others could put code: they get others (`package_store`).
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch

from fxsplit_encoder.child_process import Child
from fxsplit_encoder.kernels.kernel import capability, processors
from fxsplit_encoder.kernels.store import KernelStore, package_version

logger = logging.getLogger(__name__)

Variant = int | str
"""The width of heads, or what follows a product."""

Job = tuple[str, Variant, str]
"""A kernel's name, what it is compiled for, and a dtype's name."""

# It knows the kernels of every operation, so it is above this package.
_MODULE = "fxsplit_encoder.kernels.compile_jobs_process"

# The architecture that the package's compiler names for a capability: of Hopper this is known.
_TARGETS = {(9, 0): ("sm_90", "sm_90a")}

# This process needs fewer for its own trace.
_FEWEST_PROCESSORS = 4

# A process imports torch and the package, and compiles for seconds. What is not ready then is compiled here.
_LONGEST_WAIT = 60.0


@dataclass(slots=True)
class _Process:
    child: Child
    jobs: list[Job] = field(default_factory=list)

    def end(self, seconds: float) -> None:
        """Waits for its jobs, `seconds` at most, and ends it."""
        status = self.child.end(seconds if self.jobs else 0)
        if self.jobs and status:
            why = self.child.last_words() or f"status {status}"
            logger.warning("not compiled ahead: %s: %s", self.jobs, why)
        self.child.close()


@dataclass(slots=True)
class _State:
    lock: threading.RLock = field(default_factory=threading.RLock)
    asked: set[Job] = field(default_factory=set)
    processes: list[_Process] = field(default_factory=list)


state = _State()


# --- where the packages keep what they compile

FLASH_SWITCH = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
FLASH_DIRECTORY = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
FLASH_CACHE = "flash_attn.cute.cache_utils"
QUACK_DIRECTORY = "QUACK_CACHE_DIR"
QUACK_CACHE = "quack.cache"

_PACKAGES = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "torch")


def package_store(name: str) -> KernelStore:
    """Returns the store of a package's files for the versions of all whose code gets in."""
    return KernelStore(name, {package: package_version(package) for package in _PACKAGES})


def keep_flash_attention() -> bool:
    """Switches on the cache of `flash-attn-4` on disk before its import; returns whether it is on."""
    if (imported := sys.modules.get(FLASH_CACHE)) is not None:
        return bool(imported.CUTE_DSL_CACHE_ENABLED)
    if FLASH_SWITCH in os.environ:
        return os.environ[FLASH_SWITCH] == "1"
    if find_spec("flash_attn") is None:
        return False
    if FLASH_DIRECTORY not in os.environ:
        store = package_store("flash_attn_4")
        if not store.takes_locks:
            return False
        os.environ[FLASH_DIRECTORY] = str(store.directory)
    os.environ[FLASH_SWITCH] = "1"
    return True


def name_quack_directory() -> None:
    """Names a directory for QuACK's cache, if it was not imported before and the user named none."""
    if QUACK_DIRECTORY not in os.environ and QUACK_CACHE not in sys.modules:
        store = package_store("quack")
        if store.takes_locks:
            os.environ[QUACK_DIRECTORY] = str(store.directory)


# --- the processes


def is_possible(device: torch.device) -> bool:
    """Whether kernels are compiled ahead for a device: the package's compiler must need none for it."""
    return (
        device.type == "cuda"
        and capability(device) in _TARGETS
        and (os.cpu_count() or 1) >= _FEWEST_PROCESSORS
        and package_version("flash-attn-4") is not None
        and keep_flash_attention()
    )


def warm_up(number: int, device: torch.device) -> None:
    """Starts this many processes, which import the package and wait for jobs of `start`."""
    with state.lock:
        while len(state.processes) < number:
            state.processes.append(_launch(device))


def start(names: Iterable[str], variant: Variant, dtype: torch.dtype, device: torch.device) -> None:
    """Starts to compile kernels for such heads or products, one after the other in one process."""
    kind = str(dtype).removeprefix("torch.")
    with state.lock:
        jobs = [job for name in names if (job := (name, variant, kind)) not in state.asked]
        if not jobs or not is_possible(device):
            return
        state.asked.update(jobs)
        try:
            process = next((each for each in state.processes if not each.jobs), None)
            if process is None:
                state.processes.append(process := _launch(device))
            process.jobs += jobs
            for job in jobs:
                process.child.ask(json.dumps(job))
        except OSError as error:  # no process can be started, or it has ended: they are compiled here
            logger.warning("not compiled ahead: %s: %s", jobs, error)


def _launch(device: torch.device) -> _Process:
    kind, target = _TARGETS[capability(device)]
    environment = {
        "CUDA_VISIBLE_DEVICES": "",  # it takes neither memory nor time of the device
        "FLASH_ATTENTION_ARCH": kind,
        "CUTE_DSL_ARCH": target,
        "QUACK_ARCH": kind,
        "FLASH_ATTENTION_NUM_SMS": str(processors(device)),
    }
    return _Process(Child(_MODULE, environment=environment))


def is_running() -> bool:
    """Whether there are processes that `wait` has not waited for."""
    return bool(state.processes)


def begin_no_more() -> None:
    """Lets the processes end after their jobs; later jobs get other ones."""
    with state.lock:
        dismiss()
        for each in state.processes:
            each.child.ask_no_more()


def dismiss() -> None:
    """Ends the processes without jobs."""
    with state.lock:
        for each in [each for each in state.processes if not each.jobs]:
            each.end(0)
            state.processes.remove(each)


def wait() -> None:
    """Waits until all jobs are done. A kernel whose job fails is compiled when it is called."""
    with state.lock:
        begin = time.monotonic()
        while state.processes:
            state.processes[0].end(max(0.0, begin + _LONGEST_WAIT - time.monotonic()))
            state.processes.pop(0)


def end_all() -> None:
    """Kills all processes, at the interpreter's exit."""
    for each in state.processes:
        each.child.kill()


atexit.register(end_all)
