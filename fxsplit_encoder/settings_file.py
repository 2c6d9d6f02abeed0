"""Settings, from a YAML file or from Python, of which no more is made than settings need.

What a few lines of YAML stand for may be of any size (aliases of aliases) and of any depth, and so may a
value in Python. So the events of a file are counted before anything is made of them, and the entries of a
value before anything is read from them.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator, KeysView, Mapping, ValuesView
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import BaseModel

from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.messages import name_of, shown

MOST_BYTES = 1 << 16
"""Of a file."""
MOST_VALUES = 4096
"""Keys, values and lists that a file stands for, each alias counted as what it stands for."""
DEEPEST = 16
"""Mappings and lists inside one another."""
MOST_CHARACTERS = 1024
"""Of a single value."""

# Its parser in C takes a tenth of the time; PyYAML may be built without it.
_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_settings(path: str | os.PathLike[str]) -> Mapping[Any, Any]:
    """The mapping in a YAML file; an empty file holds none.

    Raises:
        ConfigError: it cannot be read, is not YAML (with line and column), is no mapping, or is larger or
            deeper than settings are. Nothing of its size is made then.
    """
    text = _read_text(path)
    try:
        _check_stream(text)
        values = yaml.load(text, Loader=_SettingsLoader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{_place(error.problem_mark)}not valid YAML: {error.problem}") from None
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


# --- how much a file stands for


class _Anchor:
    """What an alias of it stands for: values, and how deep they are inside one another."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.values = 1
        self.depth = 0

    def add(self, values: int, depth: int) -> None:
        self.values += values
        self.depth = max(self.depth, depth + 1)


def _check_stream(text: str) -> None:
    """Raises ConfigError for a stream of events with too many values, or too deep.

    Every alias counts as what it stands for: of a hundred lines that may be more than any memory holds.
    """
    anchors: dict[str, _Anchor] = {}
    opened = [_Anchor(None)]
    for event in yaml.parse(text, Loader=_Parser):
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append(_Anchor(event.anchor))
            if event.anchor is not None:
                anchors.pop(event.anchor, None)  # until it is whole
            _check(opened, 0, event)
        elif isinstance(event, yaml.CollectionEndEvent):
            done = opened.pop()
            opened[-1].add(done.values, done.depth)
            if done.name is not None:
                anchors[done.name] = done
        elif isinstance(event, yaml.ScalarEvent):
            _check_scalar(event)
            opened[-1].add(1, 0)
            if event.anchor is not None:
                anchors[event.anchor] = _Anchor(event.anchor)
            _check(opened, 0, event)
        elif isinstance(event, yaml.AliasEvent):
            found = _anchor_of(event, anchors, opened)
            opened[-1].add(found.values, found.depth)
            _check(opened, found.depth, event)


def _anchor_of(event: yaml.AliasEvent, anchors: dict[str, _Anchor], opened: list[_Anchor]) -> _Anchor:
    if any(outer.name == event.anchor for outer in opened):
        raise ConfigError(f"{_place(event.start_mark)}alias {shown(event.anchor)} is inside what it names")
    # One that was never set is the parser's to refuse.
    return anchors.get(event.anchor or "") or _Anchor(None)


def _check(opened: list[_Anchor], depth: int, event: Any) -> None:
    if len(opened) - 1 + depth > DEEPEST:
        raise ConfigError(
            f"{_place(event.start_mark)}nested too deep; allowed: at most {DEEPEST} mappings and lists "
            "inside one another"
        )
    if sum(outer.values for outer in opened) > MOST_VALUES:
        alias = f", alias {shown(event.anchor)} included" if isinstance(event, yaml.AliasEvent) else ""
        raise ConfigError(
            f"{_place(event.start_mark)}too many values{alias}; allowed: at most {MOST_VALUES}, every alias "
            "counted as what it stands for"
        )


def _check_scalar(event: yaml.ScalarEvent) -> None:
    if len(event.value) > MOST_CHARACTERS:
        raise ConfigError(
            f"{_place(event.start_mark)}a value of {len(event.value)} characters, {shown(event.value[:20])}"
            f"...; allowed: at most {MOST_CHARACTERS}"
        )


def _place(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""


# --- what it stands for


class _SettingsLoader(_Parser):  # type: ignore[misc]
    """YAML's safe loader, but a key given twice is an error instead of the last one winning, and so is a
    value that does not have the type of its tag.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in _keys(node):
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{shown(key.value)} is set twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        values: dict[Any, Any] = super().construct_mapping(node, deep)
        return values

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Of a date with a thirteenth month, an integer of too many digits, a tag on other text.
            kind = node.tag.rpartition(":")[2]
            what = shown(node.value) if isinstance(node, yaml.ScalarNode) else "it"
            raise yaml.MarkedYAMLError(
                problem=f"{what} is no {kind}: {error}", problem_mark=node.start_mark
            ) from None


def _keys(node: Any) -> Iterator[yaml.ScalarNode]:
    """The keys of a mapping that are plain values; others are not, as PyYAML reports."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return (key for key, _ in pairs if isinstance(key, yaml.ScalarNode))


# --- how much a value in Python stands for

# Other classes do not tell how many values there are.
_CONTAINERS = (list, tuple, set, frozenset, deque, range, KeysView, ValuesView, Mapping)


def check_extent(value: object, where: str, depth: int = 0) -> int:
    """How many values a setting has, those inside its lists and mappings included.

    Raises:
        ConfigError: too many, or too deep inside one another; or what may be iterated over without end.
    """
    if isinstance(value, str | bytes | bytearray):
        return _check_length(value, where)
    if not isinstance(value, _CONTAINERS):
        if isinstance(value, Iterable) and not isinstance(value, BaseModel) and not callable(value):
            raise ConfigError(
                f"{where}: not a setting; allowed: a single value or a list; got {shown(value)}"
            )
        return 1
    if depth > DEEPEST:
        raise ConfigError(f"{where}: nested too deep; allowed: lists and mappings {DEEPEST} deep at most")
    total = check_number(value, where)
    for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
        field = name_of(key) if isinstance(key, str) else shown(key)
        total += check_extent(entry, f"{where}.{field}" if where else field, depth + 1) - 1
        if total > MOST_VALUES:
            _refuse_number(total, value, where)
    return total + 1


def check_number(value: Any, where: str) -> int:
    """How many entries a container has."""
    # The length of a range may be no length of Python's.
    total = MOST_VALUES + 1 if isinstance(value, range) and value[MOST_VALUES:] else len(value)
    if total > MOST_VALUES:
        _refuse_number(total, value, where)
    return total


def _refuse_number(total: int, value: object, where: str) -> NoReturn:
    raise ConfigError(
        f"{where or 'settings'}: {total} values or more; allowed: at most {MOST_VALUES}; got {shown(value)}"
    )


def _check_length(text: str | bytes | bytearray, where: str) -> int:
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"{where}: {len(text)} characters; allowed: at most {MOST_CHARACTERS}; got {shown(text)}"
        )
    return 1
