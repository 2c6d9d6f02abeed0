"""Read settings from a YAML file.

Settings are short and flat. A file that is larger or deeper, or that has aliases (a few lines of which can
stand for a value of any size), is refused before a value is constructed from it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.messages import shown

MOST_BYTES = 1 << 16
DEEPEST = 16
"""Mappings and lists inside one another."""


def read_settings(path: str | os.PathLike[str]) -> Mapping[Any, Any]:
    """Return the mapping in a YAML file; an empty file holds none.

    Raises:
        ConfigError: it cannot be read, is not YAML (with line and column), is no mapping, has aliases, or is
            larger or deeper than settings are.
    """
    text = _read_text(path)
    try:
        values = yaml.load(text, Loader=_SettingsLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{place}not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"allowed: a mapping of settings at the top level; got {shown(values)}")
    return values


def _read_text(path: str | os.PathLike[str]) -> str:
    try:
        file = Path(path)
        if stat.S_ISFIFO(file.stat().st_mode):
            raise ConfigError("cannot be read: it is a pipe, which may never end; pass a file")
        with file.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ConfigError(f"larger than settings are; allowed: at most {MOST_BYTES} bytes")
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot be read: {error.reason} at byte {error.start}; allowed: UTF-8") from None
    except (OSError, TypeError, ValueError) as error:  # the last: a path with a zero character
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot be read: {error}") from None


class _SettingsLoader(yaml.SafeLoader):
    """YAML's safe loader, without aliases and with bounded depth. A key given twice is an error, where the
    last one would win, and so is a value that does not have the type of its tag.
    """

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="an alias; write the value out", problem_mark=event.start_mark)
        if self._depth > DEEPEST:
            raise yaml.MarkedYAMLError(
                problem=f"nested too deep; allowed: at most {DEEPEST} mappings and lists inside one another",
                problem_mark=event.start_mark,
            )
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in getattr(node, "value", ()) if node.id == "mapping" else ():
            if isinstance(key, yaml.ScalarNode):  # PyYAML refuses other keys
                if key.value in seen:
                    problem = f"{shown(key.value)} is set twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add(key.value)
        values: dict[Any, Any] = super().construct_mapping(node, deep)
        return values

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # A date with a thirteenth month, an integer of too many digits, a tag on other text.
            kind = node.tag.rpartition(":")[2]
            what = shown(node.value) if isinstance(node, yaml.ScalarNode) else "it"
            raise yaml.MarkedYAMLError(
                problem=f"{what} is no {kind}: {error}", problem_mark=node.start_mark
            ) from None
