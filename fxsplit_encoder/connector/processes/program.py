"""Which encoder a process runs, and how the process is started."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fxsplit_encoder.child_process import start_module
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.messages import shown

MODULE = "fxsplit_encoder.connector.processes.child"


@dataclass(frozen=True)
class EncoderProgram:
    """An encoder, by the name of the function that makes it: nothing of it is serialized.

    ``factory`` is "package.module:function". The function is called in the process with ``arguments`` by name
    and returns a `FeatureEncoder`. Arguments are numbers, strings, bytes, None, small tensors and arrays, and
    lists and mappings of them; tuples arrive as lists.
    """

    factory: str
    arguments: Mapping[str, object] = field(default_factory=dict)

    def resolve(self) -> Callable[..., Any]:
        """The function itself; InputError: there is none of this name."""
        module, _, name = self.factory.partition(":")
        if not module or not name.isidentifier():
            raise InputError(f"factory: expected package.module:function; got {shown(self.factory)}")
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            raise InputError(f"factory: no module {error.name}, of {self.factory}") from error
        if not callable(found):
            raise InputError(f"factory: module {module} has no function {name}")
        return found  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ProcessOptions:
    """How encoder processes are started, bounded and ended."""

    max_bytes: int = 1 << 30
    """Of shared memory in each direction: inputs that wait for the encoder, features that wait to be read."""
    start_timeout: float = 1800.0
    """Seconds until the encoder is ready: it loads, compiles and captures."""
    encode_timeout: float | None = None
    """Seconds that one batch may take before the process is taken for hung, and killed. None: any."""
    close_timeout: float = 10.0
    """Seconds that the process has to end by itself before it is killed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the process has besides this one's, such as CUDA_VISIBLE_DEVICES."""


def launch(connection: int, memory: int, options: ProcessOptions) -> subprocess.Popen[str]:
    """Start an encoder process, which inherits two descriptors; InputError: it cannot be started."""
    arguments = [str(number) for number in (connection, memory, os.getpid(), options.max_bytes)]
    given = {"pass_fds": (connection, memory), "stdin": subprocess.DEVNULL}
    try:
        return start_module(MODULE, arguments, options.environment, **given)
    except OSError as error:
        raise InputError(f"{sys.executable} cannot be started: {error}") from error
