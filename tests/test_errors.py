import builtins
import pickle
import re
from importlib import metadata

import pytest

from fxsplit_encoder import errors
from fxsplit_encoder.errors import FxSplitError, MissingExtraError


def drawn() -> dict[str, tuple[type, ...]]:
    """The bases of each class in the tree of the module's docstring."""
    bases: dict[str, tuple[type, ...]] = {}
    above: list[type] = [FxSplitError]
    for indent, name, builtin in re.findall(
        r"^([| ]*)\+-- (\w+)(?: \((\w+)\))?", errors.__doc__, re.MULTILINE
    ):
        depth = 1 + len(indent) // 4
        bases[name] = (above[depth - 1], *([getattr(builtins, builtin)] if builtin else []))
        above[depth:] = [getattr(errors, name)]
    return bases


def test_tree_is_as_drawn_and_drawn_whole() -> None:
    defined = {name: value.__bases__ for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined == {"FxSplitError": (Exception,), **drawn()}


def test_missing_extra_names_the_command_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(MissingExtraError("wrapping Hugging Face towers", "hf")))
    assert isinstance(error, MissingExtraError)
    assert (error.feature, error.extra) == ("wrapping Hugging Face towers", "hf")
    assert "wrapping Hugging Face towers" in str(error)
    assert "the extra 'hf'; run: pip install " in str(error)


REQUIRED = [
    "numpy>=1.26",
    "pillow>=10; extra == 'hf'",
    'transformers>=5.16; extra == "hf"',
    "fxsplit-encoder[hf,plot]; extra == 'cli'",
    "rich; extra == 'cli'",
    "plotext; extra == 'plot'",
]


def test_missing_extra_names_packages_that_an_index_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRED)
    command = str(MissingExtraError("encoder-cg", "cli")).rpartition("run: ")[2]
    assert command == "pip install 'pillow>=10' 'transformers>=5.16' plotext rich"


def test_missing_extra_of_a_package_that_pip_did_not_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert str(MissingExtraError("wrap", "hf")).endswith("pip install 'WHEEL_OR_CHECKOUT[hf]'")
