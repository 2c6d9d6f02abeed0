"""Encoder processes without the seconds that importing torch takes: this process forks instead.

Everything after the start is as in a process of its own, but for the memory of the test process, which the
fork has too. `test_spawned_process.py` starts real ones.
"""

from __future__ import annotations

import gc
import os
import signal
import traceback
import warnings
from collections.abc import Sequence

import torch

from fxsplit_encoder.connector.processes import child
from fxsplit_encoder.connector.processes.program import ProcessOptions


class ForkedProcess:
    """What `subprocess.Popen` offers, of a fork."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def wait(self) -> int:
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self._status is None:
            os.kill(self.pid, number)


def fork(arguments: Sequence[str], descriptor: int, options: ProcessOptions) -> ForkedProcess:
    """Takes the place of `program.launch`."""
    pid = quiet_fork()
    if pid == 0:
        run_child(arguments, descriptor, options)
    return ForkedProcess(pid)


def quiet_fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        return os.fork()


def run_child(arguments: Sequence[str], descriptor: int, options: ProcessOptions) -> None:
    status = 1
    try:
        gc.disable()  # objects of the test process must not close descriptors that are others' here
        os.closerange(3, descriptor)
        os.closerange(descriptor + 1, 4096)
        os.environ.update(options.environment)
        torch.set_num_threads(1)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        status = child.main(arguments)
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
