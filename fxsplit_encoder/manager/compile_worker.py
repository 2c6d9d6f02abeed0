"""Starts the process of `compile_process`, and reads its progress and results."""

from __future__ import annotations

import json
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
    PROGRESS,
    REQUEST,
    START,
    CompileRequest,
    dump_tower,
)
from fxsplit_encoder.manager.generation import Generation

_MODULE = "fxsplit_encoder.manager.compile_process"
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Compiled:
    """The results of a process."""

    start: Path
    refused: dict[str, str]
    unsaved: dict[str, str]
    not_built: str
    """Why kernels were not built; empty: they were."""


def why_not_elsewhere(generation: Generation) -> str:
    """Returns why another process cannot compile for this one; empty: it may be able to."""
    from fxsplit_encoder.compile.pieces import compile_inductor, piece_compiler

    compiler = piece_compiler(generation.config.piece_compiler, generation.pool.device)
    is_inductor = compiler is compile_inductor
    return "" if is_inductor else "only what Inductor compiles is passed on between processes"


class CompileWorker:
    """A process that compiles a generation's forwards; InputError: it cannot make the tower."""

    def __init__(self, generation: Generation) -> None:
        spec, device = generation.spec, generation.pool.device
        request = dump_tower(CompileRequest(spec.tower, spec.limits, spec.dtype, generation.config, device))
        # Only its owner may read it.
        self._directory = tempfile.TemporaryDirectory(prefix="fxsplit-encoder-", ignore_cleanup_errors=True)
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
        return Child(_MODULE, (str(self.path), str(os.getpid())), is_heard=True, own_session=True)

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
        """Waits for the results; None: `is_stopped`. CompileError: the process ended without results.
        InputError: it could not make the tower.
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
        return Compiled(self.path / START, found["refused"], found["unsaved"], ended if status else "")

    def close(self) -> None:
        """Ends the process and all that it started, and removes its files. Any thread may call it again."""
        self._child.kill()
        self._child.end()
        self._reader.join()
        self._child.close()
        self._directory.cleanup()
