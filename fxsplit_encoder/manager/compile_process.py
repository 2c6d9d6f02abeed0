"""Compiles a tower in a process for another one, which serves it; `CompileWorker` starts that process.

    python -m fxsplit_encoder.manager.compile_process DIRECTORY PARENT

It reads `REQUEST` in the directory, writes a saved start without measurements to `START` and then `ANSWER`.
At last it builds the kernels that the parent will compare, into their caches on disk; where it cannot, its
exit status and standard error say so. Lines of standard output that begin with `PROGRESS` count what is
compiled. It ends with its parent, whose end of standard input closes then.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import select
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.transformers import collected_by, collects_outputs, output_hook
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.child_process import Child
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import CompileError, FxSplitError, InputError
from fxsplit_encoder.kernels import compile_jobs
from fxsplit_encoder.kernels.store import write_atomic
from fxsplit_encoder.manager.generation import Generation
from fxsplit_encoder.manager.start import save_start
from fxsplit_encoder.manager.tower import TowerSpec
from fxsplit_encoder.manager.turns import compare_ahead
from fxsplit_encoder.pauses import StoppedError
from fxsplit_encoder.planning.limits import Limits
from fxsplit_encoder.protocol import SupportsEncoderCudaGraph
from fxsplit_encoder.runtime.captured_program import Choosers
from fxsplit_encoder.runtime.statistics import Statistics

# Tensors of so many bytes are sent with their values: tables and counts that a forward's code may read.
_SMALL = 4096

_KINDS = (torch.Tensor, nn.Parameter, nn.Buffer)

# What pickling raises, and the code of the objects that are pickled.
_OF_PICKLING = (
    *(pickle.PickleError, ArithmeticError, AssertionError, AttributeError, ImportError, LookupError),
    *(OSError, RuntimeError, TypeError, ValueError, FxSplitError),
)


class _Pickler(pickle.Pickler):
    def reducer_override(self, found: Any) -> Any:
        if isinstance(found, type | types.FunctionType) and found.__module__ == "__main__":
            raise InputError(f"{found.__qualname__} is defined in the script that was started")
        if isinstance(found, types.FunctionType) and collects_outputs(found):
            return output_hook, collected_by(found)
        if not isinstance(found, torch.Tensor):
            return NotImplemented
        if type(found) not in _KINDS:
            raise InputError(f"it holds a {type(found).__name__}, which is more than a tensor")
        if found.layout != torch.strided or found.is_quantized:
            raise InputError(f"it holds a tensor of layout {found.layout}")
        is_small = found.nbytes <= _SMALL and found.device.type != "meta"
        values = pickle.dumps(found.detach().cpu().clone()) if is_small else None
        requires_grad = found.requires_grad if isinstance(found, nn.Parameter) else None
        return _made, (*(found.shape, found.stride(), found.dtype, found.device), requires_grad, values)


def _made(
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool | None,
    values: bytes | None,
) -> Tensor:
    """Makes a tensor of zeros or these values; a parameter, unless `requires_grad` is None."""
    made = torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
    if values is not None:
        made.copy_(pickle.loads(values))
    return made if requires_grad is None else nn.Parameter(made, requires_grad)


def dump_tower(value: object) -> bytes:
    """Pickles a value with towers in it, large tensors without values; InputError: it cannot be pickled."""
    pickled = BytesIO()
    try:
        _Pickler(pickled, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except InputError:
        raise
    except _OF_PICKLING as error:
        raise InputError(f"it cannot be pickled: {type(error).__name__}: {error}") from error
    return pickled.getvalue()


REQUEST, START, ANSWER = "request.pickle", "programs.start", "answer.json"
PROGRESS = "fxsplit-encoder-progress"

CANNOT_REBUILD = 3
"""Exit status: there is no such tower here, and the message on standard error says why."""

_PARENT_GONE = 4
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class CompileRequest:
    """A tower to compile, and the settings of its captures."""

    tower: SupportsEncoderCudaGraph
    limits: Limits
    dtype: torch.dtype
    config: EncoderConfig
    device: torch.device


def main(directory: Path, parent: int) -> int:
    """Compiles what the request says; returns the exit status."""
    threading.Thread(target=_end_with, args=(parent,), name="fxsplit-parent", daemon=True).start()
    try:
        request = load_request(directory)
    except Exception as error:  # whatever importing and making its classes raises
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return CANNOT_REBUILD
    if request.device.type == "cuda":
        torch.cuda.set_device(request.device)
    tower, config = request.tower, request.config
    spec = TowerSpec(tower, tower.get_encoder_cudagraph_config(), request.limits, request.dtype)
    generation = Generation(spec, config, GraphPool(request.device), Statistics(0))
    choosers = Choosers.of(config)
    answer = compile_request(generation, choosers, directory / START)
    write_atomic(directory / ANSWER, json.dumps(answer).encode())
    build_kernels(generation, choosers)
    return 0


def load_request(directory: Path) -> CompileRequest:
    """Reads the parent's request; raises whatever importing and making its classes raises."""
    request: CompileRequest = pickle.loads((directory / REQUEST).read_bytes())
    if "transformers" in sys.modules:
        # Its towers ask by name for attention that is registered where one is wrapped, which here none is.
        importlib.import_module("fxsplit_encoder.kernels.attention.hugging_face")
    return request


def compile_request(generation: Generation, choosers: Choosers, path: Path) -> dict[str, dict[str, str]]:
    """Compiles and saves; returns by labels of paths why they are "refused" or "unsaved"."""
    with choosers.choosing(), torch.no_grad():
        generation.compile(_tell)
    refused = {
        each.label: each.refusal or "not compiled"
        for each in generation.compiled_paths
        if each.program is None
    }
    _, unsaved = save_start(generation, choosers.measurements, path, is_measured=False)
    compile_jobs.wait()  # what was begun ends with this process
    return {"refused": refused, "unsaved": unsaved}


def build_kernels(generation: Generation, choosers: Choosers) -> None:
    """Builds the kernels that captures compare, by comparing them. The times are not used."""
    device = generation.pool.device
    if not generation.scope.measured:
        return
    for measurements in choosers.measurements:
        measurements.keep_nothing_new(device)
    with choosers.choosing(), torch.no_grad():
        planned = generation.planned_captures()
        compare_ahead(lambda: generation.run(planned), device)


def _tell(done: int, total: int) -> None:
    print(PROGRESS, done, total, flush=True)


def _end_with(parent: int) -> None:
    """Ends this process with its parent, though another process may hold the parent's end of the pipe."""
    while os.getppid() == parent:
        ready, _, _ = select.select([0], [], [], _LOOK_SECONDS)
        if ready and not os.read(0, 1):
            break
    os._exit(_PARENT_GONE)


# --- in the process that serves

_MODULE = "fxsplit_encoder.manager.compile_process"
_EXIT_SECONDS = 10.0


def check_elsewhere(generation: Generation) -> None:
    """Raises InputError where another process cannot compile for this one."""
    from fxsplit_encoder.compile.pieces import compile_inductor, piece_compiler

    if piece_compiler(generation.config.piece_compiler, generation.pool.device) is not compile_inductor:
        raise InputError("only what Inductor compiles is passed on between processes")


class CompileWorker:
    """A process that compiles a generation's forwards; InputError: it cannot make the tower."""

    def __init__(self, generation: Generation) -> None:
        spec, device = generation.spec, generation.pool.device
        request = dump_tower(CompileRequest(spec.tower, spec.limits, spec.dtype, generation.config, device))
        # Only its owner may read it.
        self._directory = tempfile.TemporaryDirectory(prefix="fxsplit-encoder-", ignore_cleanup_errors=True)
        self.path = Path(self._directory.name)
        try:
            (self.path / REQUEST).write_bytes(request)
            self._child = Child(_MODULE, (str(self.path), str(os.getpid())), is_heard=True, own_session=True)
        except OSError as error:
            self._directory.cleanup()
            raise InputError(f"no process can be started: {error}") from error
        self.pid = self._child.pid

    def wait(
        self, tell: Callable[[int, int], None], is_stopped: Callable[[], bool]
    ) -> tuple[dict[str, dict[str, str]], str]:
        """Waits for `START` in `path`, and tells (done, total) of its pieces; returns what `compile_request`
        did, and why kernels were not built (empty: they were). StoppedError: `is_stopped`, and `close` ended
        it. CompileError: the process ended without results. InputError: it could not make the tower.
        """
        if is_stopped():
            raise StoppedError
        for line in self._child.lines():
            words = line.split()
            if len(words) == 3 and words[0] == PROGRESS:
                tell(int(words[1]), int(words[2]))
        if is_stopped():
            raise StoppedError
        status, answer = self._child.end(_EXIT_SECONDS), self.path / ANSWER
        if status == CANNOT_REBUILD:
            raise InputError(f"another process cannot make it: {self._child.last_words()}")
        ended = f"the process that compiled ended with status {status}"
        if said := self._child.last_words() if status or not answer.exists() else "":
            ended += f": {said}"
        if not answer.exists():
            raise CompileError(ended)
        return json.loads(answer.read_text(encoding="utf-8")), ended if status else ""

    def close(self) -> None:
        """Ends the process and all that it started, and removes its files. Any thread may call it again."""
        self._child.kill()
        self._child.end()
        self._child.close()
        self._directory.cleanup()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
