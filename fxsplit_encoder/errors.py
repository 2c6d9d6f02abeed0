"""What can go wrong, as one tree.

FxSplitError
+-- ConfigError (ValueError)             a setting is unknown, malformed or contradicts another
+-- InputError (ValueError)              an argument or a tensor is not what the call takes
|   +-- WeightsLayoutError               parameters are others than those that were compiled for
|   +-- MediaError                       an image, video or clip cannot be decoded, or is beyond a limit
+-- UnsupportedTowerError (TypeError)    no adapter encodes this module
+-- CompileError (RuntimeError)          a graph could not be split or a piece not compiled
+-- CaptureError (RuntimeError)          a token budget could not be captured
|   +-- CaptureMemoryError               it did not fit in memory, or in `max_graph_bytes`
+-- ReplayError (RuntimeError)           a capture rule was broken at replay
|   +-- WeightsMovedError                parameters lie elsewhere than at the capture
+-- RankError (RuntimeError)             another rank of the process group failed, or is gone
+-- MissingExtraError (ImportError)      an optional dependency is not installed

Each class is also the built-in error that its parenthesis names, so callers may catch either.
"""


class FxSplitError(Exception):
    """Base of every error that this library raises on purpose."""


class ConfigError(FxSplitError, ValueError):
    """One or more settings are wrong.

    Each argument is one problem, a line that starts with the dotted path of the field.
    """

    @property
    def problems(self) -> tuple[str, ...]:
        """The single problems, in the order of the fields."""
        return tuple(str(problem) for problem in self.args)

    def __str__(self) -> str:
        return "\n".join(self.problems)


class InputError(FxSplitError, ValueError):
    """An argument, a tensor or what a tower declares about its items is not what the call takes."""


class WeightsLayoutError(InputError):
    """Parameters have other sizes, strides, dtypes or devices than those that a program was compiled with."""


class MediaError(InputError):
    """An image, a video or a clip cannot be decoded, or is beyond a limit."""


class UnsupportedTowerError(FxSplitError, TypeError):
    """No adapter encodes this module, and it does not implement `SupportsEncoderCudaGraph`."""


class CompileError(FxSplitError, RuntimeError):
    """A graph could not be traced or split, or one of its pieces not compiled."""


class CaptureError(FxSplitError, RuntimeError):
    """A token budget could not be captured."""


class CaptureMemoryError(CaptureError):
    """A token budget was not captured because it did not fit in memory, or in `max_graph_bytes`."""


class ReplayError(FxSplitError, RuntimeError):
    """A capture rule was broken at replay: a buffer is missing, has moved, or is too small."""


class WeightsMovedError(ReplayError):
    """Parameters were moved or replaced since the capture, which reads them where they were."""


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
        return (
            f"{self.feature} needs packages that are not installed; "
            f"run: pip install 'fxsplit-encoder[{self.extra}]'"
        )
