"""Errors of this package, as one tree.

FxSplitError
+-- ConfigError (ValueError)             a setting is unknown, malformed or contradicts another
+-- InputError (ValueError)              an argument or a tensor is not what the call takes
|   +-- TowerChangedError                modules are others than those that were captured
|   +-- WeightsLayoutError               parameters are others than those that were compiled for
|   +-- MediaError                       an image, video or clip cannot be decoded, or is beyond a limit
|   +-- StartFileError                   a saved start is damaged, or was not made for this
+-- UnsupportedTowerError (TypeError)    no adapter encodes this module
+-- CompileError (RuntimeError)          a graph could not be split or a piece not compiled
|   +-- UntraceableError                 Dynamo does not trace the code as one graph
+-- CaptureError (RuntimeError)          a token budget could not be captured
|   +-- CaptureMemoryError               it did not fit in memory, or in `max_graph_bytes`
+-- ReplayError (RuntimeError)           a capture rule was broken at replay
|   +-- WeightsMovedError                parameters lie elsewhere than at the capture
+-- ConnectorError (RuntimeError)        a request's media were not encoded; `retryable`, `kind`
|   +-- ConnectorFullError               too much waits already
+-- QueueFullError (RuntimeError)        too many items wait for an encoder; `retryable`
+-- QueueTimeoutError (TimeoutError)     no encoder has taken an item within its timeout; `retryable`
+-- QueueClosedError (RuntimeError)      a queue takes no more items
+-- EncoderLostError (RuntimeError)      an encoder's process, thread or device is gone
+-- TransportError (RuntimeError)        what another process handed over is not what was agreed, or gone
+-- RankError (RuntimeError)             another rank of the process group failed, or is gone
+-- MissingExtraError (ImportError)      an optional dependency is not installed

Each class is also the built-in error that its parenthesis names, so callers may catch either.
"""

import re
import shlex
from importlib import metadata

_DISTRIBUTION = "fxsplit-encoder"
_OWN_EXTRAS = re.compile(rf"{_DISTRIBUTION}\[([\w,-]+)\]")


class FxSplitError(Exception):
    """Base of every error that this library raises on purpose."""

    retryable = False
    """Whether the same call may succeed if it is made again, here or at another encoder."""


class ConfigError(FxSplitError, ValueError):
    """Settings are wrong: each argument is a line that starts with the dotted path of a field."""

    @property
    def problems(self) -> tuple[str, ...]:
        """The single problems, in the order of the fields."""
        return tuple(str(problem) for problem in self.args)

    def __str__(self) -> str:
        return "\n".join(self.problems)


class InputError(FxSplitError, ValueError):
    """An argument, a tensor or what a tower declares about its items is not what the call takes."""


class TowerChangedError(InputError):
    """A tower has other modules, hooks or forwards than when it was captured, or it was compiled."""


class WeightsLayoutError(InputError):
    """Parameters have other sizes, strides, dtypes or devices than those that a program was compiled with."""


class MediaError(InputError):
    """An image, a video or a clip cannot be decoded, or is beyond a limit."""


class StartFileError(InputError):
    """A saved start is damaged, or another device, version, tower or setting made it. Each argument is one
    difference: its name, what was expected, what the file has.
    """

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


class UnsupportedTowerError(FxSplitError, TypeError):
    """No adapter encodes this module, and it does not implement `SupportsEncoderCudaGraph`."""


class CompileError(FxSplitError, RuntimeError):
    """A graph could not be traced or split, or one of its pieces not compiled."""


class UntraceableError(CompileError):
    """Dynamo does not trace the code as one graph."""


class CaptureError(FxSplitError, RuntimeError):
    """A token budget could not be captured."""


class CaptureMemoryError(CaptureError):
    """A token budget was not captured because it did not fit in memory, or in `max_graph_bytes`."""


class ReplayError(FxSplitError, RuntimeError):
    """A capture rule was broken at replay: a buffer is missing, has moved, or is too small."""


class WeightsMovedError(ReplayError):
    """Parameters were moved or replaced since the capture, which reads them where they were."""


class ConnectorError(FxSplitError, RuntimeError):
    """Media of one request were not encoded; other requests are not concerned. `kind` is one of
    `fxsplit_encoder.connector.FAILURE_KINDS`, by which failures are counted.
    """

    def __init__(self, message: str, kind: str, retryable: bool) -> None:
        # All stay in `args`, so that the error survives pickling between processes.
        super().__init__(message, kind, retryable)
        self.kind = kind
        self.retryable = retryable

    def __str__(self) -> str:
        return str(self.args[0])


class ConnectorFullError(ConnectorError):
    """The connector takes no further request before some of those that wait are done."""


class QueueFullError(FxSplitError, RuntimeError):
    """An `EncodeQueue` takes no further item before some of those that wait are taken."""

    retryable = True


class QueueTimeoutError(FxSplitError, TimeoutError):
    """No worker of an `EncodeQueue` has taken an item within its timeout."""

    retryable = True


class QueueClosedError(FxSplitError, RuntimeError):
    """An `EncodeQueue` was closed and takes no more items."""


class EncoderLostError(FxSplitError, RuntimeError):
    """An encoder is gone with its process, thread or device; what it had in hand may go to another."""

    retryable = True


class TransportError(FxSplitError, RuntimeError):
    """A message, a descriptor or a handle is not what two processes agreed on, or what it names is gone."""


class RankError(FxSplitError, RuntimeError):
    """Another rank of the process group failed, has ended, or did not answer in time."""


class MissingExtraError(FxSplitError, ImportError):
    """`feature` needs packages that only the pip extra `extra` installs."""

    def __init__(self, feature: str, extra: str) -> None:
        # Both stay in `args`, so that the error survives pickling between processes.
        super().__init__(feature, extra)
        self.feature = feature
        self.extra = extra

    def __str__(self) -> str:
        packages = " ".join(map(shlex.quote, _packages_of(self.extra)))
        return (
            f"{self.feature} needs packages that are not installed, those of the extra {self.extra!r}; run: "
            f"pip install " + (packages or f"'WHEEL_OR_CHECKOUT[{self.extra}]'")
        )


def _packages_of(extra: str) -> list[str]:
    """Returns the requirements of an extra; empty if this package was not installed by pip."""
    try:
        required = metadata.requires(_DISTRIBUTION) or ()
    except metadata.PackageNotFoundError:
        return []
    packages: list[str] = []
    for line in required:
        package, _, marker = (part.strip() for part in line.partition(";"))
        if re.search(rf"extra == ['\"]{extra}['\"]", marker):
            own = _OWN_EXTRAS.fullmatch(package)
            packages += (p for name in own[1].split(",") for p in _packages_of(name)) if own else [package]
    return packages
