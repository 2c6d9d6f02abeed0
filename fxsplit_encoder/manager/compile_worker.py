"""A process that compiles a tower's forwards while this one serves, as this one sees it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fxsplit_encoder.errors import CompileError, InputError
from fxsplit_encoder.manager.compile_process import (
    ANSWER,
    CANNOT_REBUILD,
    NOT_BUILT,
    PROGRESS,
    REQUEST,
    START,
    CompileRequest,
    dump_tower,
)
from fxsplit_encoder.manager.generation import Generation

logger = logging.getLogger(__name__)

_MODULE = "fxsplit_encoder.manager.compile_process"
_POLL_SECONDS = 0.05
_LAST_WORDS = 400
"""Characters of what a process that failed said at last."""


@dataclass(frozen=True)
class Compiled:
    """What a process found out."""

    start: Path
    refused: dict[str, str]
    unsaved: dict[str, str]
    not_built: str
    """Why kernels that are to be compared were not built there; empty: they were."""


def why_not_elsewhere(generation: Generation) -> str:
    """Why another process cannot compile for this one; empty: it can, as far as that is plain."""
    from fxsplit_encoder.compile.pieces import compile_inductor, piece_compiler

    config = generation.config
    if piece_compiler(config.piece_compiler, generation.pool.device) is not compile_inductor:
        return "only what Inductor compiles is passed on between processes"
    return ""


class CompileWorker:
    """The process, from its start to its end.

    Args:
        generation: whose forwards are compiled. Nothing else may change its tower meanwhile.

    Raises:
        InputError: no other process can make the tower, and why.
    """

    def __init__(self, generation: Generation) -> None:
        served, device = generation.served, generation.pool.device
        request = dump_tower(
            CompileRequest(served.tower, served.limits, served.dtype, generation.config, device)
        )
        self._directory = tempfile.TemporaryDirectory(
            prefix="fxsplit-encoder-", ignore_cleanup_errors=True
        )  # its owner's alone
        self.path = Path(self._directory.name)
        self.progress: tuple[int, int] = (0, 0)
        try:
            (self.path / REQUEST).write_bytes(request)
            self._process = self._launch()
        except OSError as error:
            self._directory.cleanup()
            raise InputError(f"no process can be started: {error}") from error
        self._reader = threading.Thread(target=self._read, name="fxsplit-compile-progress", daemon=True)
        self._reader.start()

    def _launch(self) -> subprocess.Popen[str]:
        environment = {**os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with (self.path / "stderr").open("w", encoding="utf-8") as errors:
            # -P: nothing is imported from the directory that the process happens to be in. A session of its
            # own: what it starts is ended with it.
            return subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(self.path), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
                errors="replace",
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed by `close`
            for line in self._process.stdout:
                words = line.split()
                if len(words) == 3 and words[0] == PROGRESS:
                    self.progress = int(words[1]), int(words[2])

    def wait(self, is_stopped: Callable[[], bool], tell: Callable[[int, int], None]) -> Compiled | None:
        """What the process found out, once it has; None: it is not wanted any more.

        Raises:
            CompileError: it ended without, and how.
            InputError: it could not make the tower, and why.
        """
        while self._process.poll() is None:
            if is_stopped():
                return None
            tell(*self.progress)
            time.sleep(_POLL_SECONDS)
        status = self._process.returncode
        answer = self.path / ANSWER
        if status == CANNOT_REBUILD:
            raise InputError(f"another process cannot make it: {self._last_words()}")
        ended = f"the process that compiled ended with status {status}"
        if said := self._last_words() if status or not answer.exists() else "":
            ended += f": {said}"
        if not answer.exists():
            raise CompileError(ended)
        found = json.loads(answer.read_text(encoding="utf-8"))
        not_built = self.path / NOT_BUILT
        problem = not_built.read_text(encoding="utf-8") if not_built.exists() else status and ended
        return Compiled(self.path / START, found["refused"], found["unsaved"], problem or "")

    def _last_words(self) -> str:
        said = (self.path / "stderr").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return said[-1][-_LAST_WORDS:] if said else ""

    def close(self) -> None:
        """Ends the process and all that it started, and removes its files; from any thread, and again."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._directory.cleanup()
