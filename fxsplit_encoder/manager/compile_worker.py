"""A process that compiles a tower's forwards while this one serves, as this one sees it."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fxsplit_encoder.child_process import Child
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


@dataclass(frozen=True)
class Compiled:
    """The results of a process."""

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
        generation: whose forwards are compiled. Nothing else may change its tower while it runs.

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
            self._child = self._launch()
        except OSError as error:
            self._directory.cleanup()
            raise InputError(f"no process can be started: {error}") from error
        self._reader = threading.Thread(target=self._read, name="fxsplit-compile-progress", daemon=True)
        self._reader.start()

    def _launch(self) -> Child:
        arguments = (str(self.path), str(os.getpid()))
        return Child(_MODULE, arguments, is_heard=True, own_session=True)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._child.pid

    def _read(self) -> None:
        for line in self._child.lines():
            words = line.split()
            if len(words) == 3 and words[0] == PROGRESS:
                self.progress = int(words[1]), int(words[2])

    def wait(self, is_stopped: Callable[[], bool], tell: Callable[[int, int], None]) -> Compiled | None:
        """What the process found out, once it has; None: it is not wanted any more.

        Raises:
            CompileError: it ended without, and how.
            InputError: it could not make the tower, and why.
        """
        while (status := self._child.status) is None:
            if is_stopped():
                return None
            tell(*self.progress)
            time.sleep(_POLL_SECONDS)
        answer = self.path / ANSWER
        if status == CANNOT_REBUILD:
            raise InputError(f"another process cannot make it: {self._child.last_words()}")
        ended = f"the process that compiled ended with status {status}"
        if said := self._child.last_words() if status or not answer.exists() else "":
            ended += f": {said}"
        if not answer.exists():
            raise CompileError(ended)
        found = json.loads(answer.read_text(encoding="utf-8"))
        not_built = self.path / NOT_BUILT
        problem = not_built.read_text(encoding="utf-8") if not_built.exists() else status and ended
        return Compiled(self.path / START, found["refused"], found["unsaved"], problem or "")

    def close(self) -> None:
        """Ends the process and all that it started, and removes its files; from any thread, and again."""
        self._child.kill()
        self._child.end()
        self._reader.join()
        self._child.close()
        self._directory.cleanup()
