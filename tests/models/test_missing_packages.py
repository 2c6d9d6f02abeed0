import importlib
import sys

import pytest

import fxsplit_encoder.models
from fxsplit_encoder.errors import MissingExtraError


@pytest.mark.parametrize("package", ["PIL", "safetensors", "transformers"])
def test_a_missing_package_names_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"the extra 'hf'; run: pip install "):
        importlib.reload(fxsplit_encoder.models)


def test_another_missing_module_is_named_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> None:
        raise ModuleNotFoundError("No module named 'regex'", name="regex")

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(ModuleNotFoundError, match="regex"):
        importlib.reload(fxsplit_encoder.models)
