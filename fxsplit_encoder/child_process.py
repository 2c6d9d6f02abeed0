"""Start, ask, watch and end a process that runs a module of this library in a Python interpreter of its own.

`start_module` starts one; a `Child` also holds its pipes and what it writes to standard error.
"""

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
    executable: str = "",
    **options: Any,
) -> subprocess.Popen[str]:
    """Starts a module as a process.

    Args:
        environment: variables that it has besides this process's.
        executable: the Python that runs it; "": this one, which then finds the same packages.
        options: of `subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
    """
    variables = {**os.environ, **environment}
    if not executable:
        variables["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    # -P: nothing is imported from the directory that the process happens to be in.
    command = [executable or sys.executable, "-P", "-m", module, *arguments]
    return subprocess.Popen(command, env=variables, text=True, errors="replace", **options)


class Child:
    """A process that reads lines from standard input and ends with it. Its `pid` is the process's.

    Args:
        module: that it runs, with `arguments`.
        environment: variables that it has besides this process's.
        is_heard: whether `lines` reads its standard output.
        own_session: whether what it starts is ended with it.

    Raises:
        OSError: it cannot be started.
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
        """Its exit status, minus the number of a signal that ended it; None: it runs."""
        return self._process.poll()

    @property
    def is_asked(self) -> bool:
        """Whether it still takes lines."""
        return self._process.stdin is not None and not self._process.stdin.closed

    def ask(self, line: str) -> None:
        """Writes a line to it; OSError where it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def ask_no_more(self) -> None:
        """Lets it end when it has done what it was asked."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._process.stdin.close()

    def lines(self) -> Iterator[str]:
        """What it writes to standard output, until it ends or `close` is called."""
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed
            yield from self._process.stdout

    def last_words(self) -> str:
        """The last line that it wrote to standard error; empty: there is none, or `close` was called."""
        said: list[str] = []
        with contextlib.suppress(ValueError):  # closed, perhaps by another thread
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines()
        return said[-1][-_LAST_WORDS:] if said else ""

    def end(self, seconds: float = 0.0) -> int:
        """Asks no more, waits until it ends, for so long at most, and kills it then; its exit status."""
        self.ask_no_more()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def kill(self) -> None:
        """Kills it, and what it started in a session of its own, unless it has ended."""
        if self._own_session and self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()

    def close(self) -> None:
        """Closes this process's ends of its pipes; it goes on until it has done what it was asked."""
        self.ask_no_more()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
