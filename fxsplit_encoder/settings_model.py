"""What models of settings share: their base class, which raises `ConfigError`, and a few kinds of values."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.messages import name_of, nearest, shown

# ByteSize reads what a text begins with, and ignores the rest.
_BYTES = re.compile(r"\s*(\d*\.)?\d+\s*[a-zA-Z]*\s*")
_BYTE_SIZE = TypeAdapter(ByteSize)

# Memory is counted in 64 bits.
_MOST_MEMORY = 2**63 - 1

MOST_PROBLEMS = 20
"""That one error names."""

Bytes = Annotated[int, Field(strict=True, ge=1, le=_MOST_MEMORY)]
"""A number of bytes."""


class Settings(BaseModel):
    """A frozen pydantic model whose constructor raises `ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(*_problems(error, list(type(self).model_fields))) from None

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
    """What is said of an option that there is not."""
    text = name_of(name)
    return f"{text}: unknown option; {nearest(text, allowed)}allowed: {', '.join(allowed)}"


def _problems(error: ValidationError, allowed: Sequence[str]) -> Iterator[str]:
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
