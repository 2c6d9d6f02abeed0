"""Faults at this end leave no process behind, and nobody who waits for one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fxsplit_encoder.connector.processes import encoder_process
from fxsplit_encoder.connector.processes.encoder_process import EncoderProcess
from fxsplit_encoder.connector.processes.program import ProcessOptions
from fxsplit_encoder.errors import EncoderLostError
from tests.connector.resources import eventually, nothing_left


def running(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is launched from now on."""
    launched: list[Any] = []
    launch = encoder_process.launching.launch

    def remember(*arguments: Any) -> Any:
        launched.append(launch(*arguments))
        return launched[-1]

    monkeypatch.setattr(encoder_process.launching, "launch", remember)
    return launched


def test_a_process_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    launched = running(monkeypatch)

    def fail(pid: int) -> int:
        raise OSError("too many open files")

    monkeypatch.setattr(os, "pidfd_open", fail)
    with nothing_left():
        with pytest.raises(OSError, match="too many"):
            EncoderProcess(ProcessOptions(runtime_directory=short_path, max_bytes=4096), lambda: None)
        assert launched[0].poll() == -signal.SIGKILL


def test_a_listener_that_fails_ends_its_process_and_tells_whoever_waits(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    launched = running(monkeypatch)

    def fail(self: EncoderProcess) -> None:
        raise RuntimeError("no such message")

    monkeypatch.setattr(EncoderProcess, "_flush", fail)
    with nothing_left():
        process = EncoderProcess(ProcessOptions(runtime_directory=short_path, max_bytes=4096), lambda: None)
        with process.asking(1) as replies:
            process.connect()
            with pytest.raises(EncoderLostError, match="no such message"):
                process.next_reply(replies, 60)
        eventually(lambda: not process.is_alive)
        process.close()
        assert launched[0].poll() == -signal.SIGKILL
