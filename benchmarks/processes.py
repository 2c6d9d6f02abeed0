"""Rows that a process of its own measures: what it sent before it failed or took too long stays."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
from storage import Row, one_line

_SECONDS_TO_END = 30
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_environment = threading.Lock()


def run_process(
    rows: Callable[..., Iterable[Row]],
    arguments: tuple[Any, ...],
    timeout: float,
    on_row: Callable[[Row], None],
    method: str,
    gpu: str | None = None,
) -> str | None:
    """Calls `on_row` with each of `rows(*arguments)` of a new process, which sees that GPU of `visible_gpus`
    alone if one is given; returns why it failed, or None.
    """
    context: Any = multiprocessing.get_context(method if gpu is None else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(rows, arguments, sender))
    # Set in the process, the variable would come too late: imports already initialize the driver.
    with _environment, mock.patch.dict(os.environ, {} if gpu is None else {_VISIBLE: gpu}):
        process.start()
    sender.close()
    deadline = time.monotonic() + timeout
    try:
        while receiver.poll(max(0.0, deadline - time.monotonic())):
            sent: Row = receiver.recv()
            if "end" in sent:
                process.join(_SECONDS_TO_END)
                failure: str | None = sent["end"]
                return failure
            on_row(sent)
        return f"stopped after {timeout:.0f} s"
    except EOFError:
        process.join()
        return f"the process ended with exit code {process.exitcode}"
    finally:
        _stop(process)


def visible_gpus() -> list[str]:
    """The GPUs of this process, by the names that CUDA_VISIBLE_DEVICES takes."""
    named = os.environ.get(_VISIBLE)
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def _work(rows: Callable[..., Iterable[Row]], arguments: tuple[Any, ...], sender: Connection) -> None:
    os.setpgrp()
    failure = None
    try:
        for row in rows(*arguments):
            sender.send(row)
    except Exception as error:
        traceback.print_exc()
        failure = one_line(error)
    sender.send({"end": failure})


def _stop(process: Any) -> None:
    """Ends a process that still runs, with what it started: compilers run in processes of their own."""
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):  # it had no group of its own yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
