"""Processes that run a module of this library in a Python interpreter of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_LAST_WORDS = 400
"""Characters of a last line."""


def start_module(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    **options: Any,
) -> subprocess.Popen[str]:
    """Starts a module by `subprocess.Popen` and its `options`, with the variables of this process and of
    `environment`; OSError if that fails. This Python runs it, with the same packages.
    """
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    variables = {**os.environ, **environment, "PYTHONPATH": path}
    # -P: nothing is imported from the directory that the process happens to be in.
    command = [sys.executable, "-P", "-m", module, *arguments]
    return subprocess.Popen(command, env=variables, text=True, errors="replace", **options)


class Child:
    """A process that reads lines from standard input until that is closed; OSError if it cannot be started.

    Args:
        module, arguments, environment: as of `start_module`.
        is_heard: whether `lines` reads its standard output.
        own_session: whether the processes that it starts are killed with it.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        *,
        is_heard: bool = False,
        own_session: bool = False,
    ) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._own_session = own_session
        try:
            self._process = start_module(
                module,
                arguments,
                environment or {},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if is_heard else subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=own_session,
            )
        except OSError:
            self._errors.close()
            raise
        self.pid = self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status, minus the number of a signal that ended it; None while it runs."""
        return self._process.poll()

    def ask(self, line: str) -> None:
        """Writes a line to its standard input; OSError if it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def ask_no_more(self) -> None:
        """Closes its standard input, so that it ends after the lines that it has."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._process.stdin.close()

    def lines(self) -> Iterator[str]:
        """Lines of its standard output, until it ends or `close` is called."""
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed
            yield from self._process.stdout

    def last_words(self) -> str:
        """The last line of its standard error; empty if there is none, or after `close`."""
        said: list[str] = []
        with contextlib.suppress(ValueError):  # closed, perhaps by another thread
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines()
        return said[-1][-_LAST_WORDS:] if said else ""

    def end(self, seconds: float = 0.0) -> int:
        """Closes its standard input, kills it if it then runs longer than this; returns its exit status."""
        self.ask_no_more()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def kill(self) -> None:
        """Kills it, and with `own_session` the processes that it started."""
        if self._own_session and self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()

    def close(self) -> None:
        """Closes this process's ends of its pipes; it runs on until it has read all lines."""
        self.ask_no_more()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
