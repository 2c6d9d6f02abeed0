import pickle

import pytest

from fxsplit_encoder import errors
from fxsplit_encoder.errors import ConfigError, FxSplitError, InputError, MissingExtraError


@pytest.mark.parametrize(
    ("name", "parents"),
    [
        ("ConfigError", (FxSplitError, ValueError)),
        ("InputError", (FxSplitError, ValueError)),
        ("MediaError", (InputError,)),
        ("WeightsLayoutError", (InputError,)),
        ("UnsupportedTowerError", (FxSplitError, TypeError)),
        ("CompileError", (FxSplitError, RuntimeError)),
        ("CaptureError", (FxSplitError, RuntimeError)),
        ("CaptureMemoryError", (errors.CaptureError,)),
        ("ReplayError", (FxSplitError, RuntimeError)),
        ("WeightsMovedError", (errors.ReplayError,)),
        ("RankError", (FxSplitError, RuntimeError)),
        ("MissingExtraError", (FxSplitError, ImportError)),
    ],
)
def test_tree_is_as_drawn(name: str, parents: tuple[type, ...]) -> None:
    assert getattr(errors, name).__bases__ == parents
    assert f"-- {name} " in str(errors.__doc__)


def test_tree_is_drawn_whole() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    drawn = {line.split("-- ")[1].split()[0] for line in str(errors.__doc__).splitlines() if "-- " in line}
    assert defined == drawn | {"FxSplitError"}


def test_config_error_shows_each_problem_on_a_line() -> None:
    error = ConfigError("mode: bad", "debug: bad")
    assert error.problems == ("mode: bad", "debug: bad")
    assert str(error) == "mode: bad\ndebug: bad"


def test_missing_extra_names_the_command_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(MissingExtraError("wrapping Hugging Face towers", "hf")))
    assert isinstance(error, MissingExtraError)
    assert (error.feature, error.extra) == ("wrapping Hugging Face towers", "hf")
    assert "wrapping Hugging Face towers" in str(error)
    assert "pip install 'fxsplit-encoder[hf]'" in str(error)
