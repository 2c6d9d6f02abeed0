"""Base class of settings that raises `ConfigError`, kinds of values, and YAML files."""

import itertools
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.messages import name_of, nearest, shown

# ByteSize reads what a text begins with, and ignores the rest.
_BYTES = re.compile(r"\s*(\d*\.)?\d+\s*[a-zA-Z]*\s*")
_BYTE_SIZE = TypeAdapter(ByteSize)

# Memory is counted in 64 bits.
_MOST_MEMORY = 2**63 - 1

MOST_PROBLEMS = 20
"""In one error."""

Bytes = Annotated[int, Field(strict=True, ge=1, le=_MOST_MEMORY)]
"""A number of bytes."""


class Settings(BaseModel):
    """A frozen pydantic model whose constructor raises `ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(*problems_of(error, list(type(self).model_fields))) from None

    def __hash__(self) -> int:
        values = (getattr(self, name) for name in type(self).model_fields)
        return hash(tuple(frozenset(v.items()) if isinstance(v, Mapping) else v for v in values))

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        for name, field in type(self).model_fields.items():
            if (value := getattr(self, name)) != field.get_default(call_default_factory=True):
                yield name, value

    def __str__(self) -> str:
        return repr(self)


def one_of(names: Sequence[str], *, or_callable: bool = False) -> BeforeValidator:
    """Accepts these names alone."""
    allowed = ", ".join(names) + (", or a callable" if or_callable else "")

    def check(value: object) -> object:
        if (isinstance(value, str) and value in names) or (or_callable and callable(value)):
            return value
        raise ValueError(f"not one of the allowed: {allowed}")

    return BeforeValidator(check)


def parse_bytes(value: object) -> object:
    """A size such as "4GiB" in bytes; anything but a string as it is."""
    if not isinstance(value, str):
        return value
    try:
        size = int(_BYTE_SIZE.validate_python(value)) if _BYTES.fullmatch(value) else 0
    except (ValidationError, OverflowError):
        size = 0
    if not 1 <= size <= _MOST_MEMORY:
        raise ValueError("not a size; allowed: bytes, or a number with a unit, such as 4GiB, 4GB, 4gb or 4G")
    return size


def unknown_option(name: object, allowed: Sequence[str]) -> str:
    """Returns the message about an unknown option."""
    text = name_of(name)
    return f"{text}: unknown option; {nearest(text, allowed)}allowed: {', '.join(allowed)}"


def problems_of(error: ValidationError, allowed: Sequence[str]) -> Iterator[str]:
    """One line for each wrong field, a nested model's own lines under the name of the field it is in."""
    count = error.error_count()
    for detail in itertools.islice(error.errors(include_url=False), MOST_PROBLEMS):
        field = ".".join(map(name_of, detail["loc"]))
        cause = detail.get("ctx", {}).get("error")
        if detail["type"] == "extra_forbidden":
            yield unknown_option(field, allowed)
        elif isinstance(cause, ConfigError):
            yield from (f"{field}.{problem}" if field else problem for problem in cause.problems)
        else:
            allowed_values = detail["msg"].replace("Input should be", "allowed:").replace("tuple", "list")
            yield f"{field}: {cause or allowed_values}; got {shown(detail['input'])}"
    if count > MOST_PROBLEMS:
        yield f"and {count - MOST_PROBLEMS} settings more"


# --- YAML files
#
# Settings are short and flat. A file that is larger or deeper, or that has aliases (a few lines of which can
# stand for a value of any size), is refused before a value is constructed from it.

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
