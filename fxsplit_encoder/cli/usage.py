"""Print errors of the parser, the library and Python as one line on stderr, and exit with code 2."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import typer
from typer.core import TyperGroup

from fxsplit_encoder import __version__
from fxsplit_encoder.errors import FxSplitError, InputError, MissingExtraError
from fxsplit_encoder.messages import nearest

PROGRAM = "encoder-cg"
_EXTRA_PACKAGES = {
    *("PIL", "huggingface_hub", "jinja2", "matplotlib", "plotext", "rich", "safetensors", "transformers")
}


class OneLineErrors(TyperGroup):
    """A group of commands that says in a line what is wrong; typer draws a box, Python a traceback."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs a command line and exits: 0 for success, 1 where outputs differ, 2 for a mistake."""
        arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
        try:
            code = super().main(arguments, PROGRAM, complete_var, False, windows_expand_args, **extra)
        except typer.Abort:
            code = 1
        except Exception as error:
            lines = _lines_of(error)
            if not lines:
                raise
            for line in lines:
                typer.echo(f"{PROGRAM}: error: {line}", err=True)
            code = 2
        sys.exit(code if isinstance(code, int) else 0)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of a name; raises InputError where there is none."""
        name, commands = args[0], list(self.commands)
        if name not in self.commands and not name.startswith("-"):
            asked = nearest(name, commands)
            raise InputError(f"{name}: no such command; {asked}expected one of {', '.join(commands)}")
        return super().resolve_command(ctx, args)


def _lines_of(error: Exception) -> list[str]:
    """Returns the lines of an error for the user; none: it is a bug of this package."""
    if isinstance(error, MissingExtraError) and error.extra not in ("ray", "serve"):
        return [str(MissingExtraError(PROGRAM, "cli"))]  # which brings the packages of `hf`
    if isinstance(error, FxSplitError):
        return str(error).splitlines()
    if hasattr(error, "format_message"):  # of the parser, whose base class moves between typer's versions
        return [" ".join(error.format_message().replace("Value error, ", "").split())]
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in _EXTRA_PACKAGES:
        return [str(MissingExtraError(PROGRAM, "cli"))]
    if type(error).__name__ == "OutOfMemoryError":
        return ["out of memory on the device; give it smaller images, fewer blocks, or list fewer budgets"]
    return []


def versions() -> str:
    """This command's, and those of what it runs on, in one line."""
    found = [f"{PROGRAM} {__version__}"]
    for package in ("torch", "transformers"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join([*found, f"Python {platform.python_version()}"])
