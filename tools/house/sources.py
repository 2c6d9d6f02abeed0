"""What the source files say by themselves: sizes, and how many parameters functions take."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from house.measure import PACKAGE, ROOT, Measure

ASIDE = ("connector", "integrations")
"""Directories of the package that are not counted in its size."""
LONG_FUNCTION, LONG_FILE = 80, 400
"""Lines from which a function or a file is called long."""
_ASIDE_DECORATORS = {"jit", "autotune", "heuristics", "command"}
"""Of Triton kernels, and of the command's verbs, whose parameters are options on a command line."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A file of the package."""

    path: Path
    """Below the package."""
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text)

    @property
    def num_lines(self) -> int:
        """As `wc -l` counts them."""
        return len(self.text.splitlines())

    @property
    def is_aside(self) -> bool:
        """Whether the file is not counted in the package's size."""
        return self.path.parts[0] in ASIDE

    def functions(self) -> Iterator[Function]:
        """Every function and method, those inside others too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))


def read_sources(package: Path = ROOT / PACKAGE) -> list[Source]:
    """Every Python file of the package, by path."""
    paths = sorted(package.rglob("*.py"))
    return [Source(path.relative_to(package), path.read_text(encoding="utf-8")) for path in paths]


def measure_sizes(sources: list[Source]) -> list[Measure]:
    """Files, lines, long files, long functions and the longest list of parameters."""
    counted = [source for source in sources if not source.is_aside]
    aside = f"without {', '.join(ASIDE)}"
    long_files = [source for source in counted if source.num_lines >= LONG_FILE]
    return [
        Measure("files", len(counted), 150, about=True, note=aside),
        Measure("lines", sum(source.num_lines for source in counted), 22_000, about=True, note=aside),
        Measure(
            f"files of {LONG_FILE} lines or more",
            len(long_files),
            0,
            items=tuple(f"{source.path}: {source.num_lines} lines" for source in long_files),
        ),
        _long_functions(counted),
        _most_parameters(sources),
    ]


def _long_functions(sources: list[Source]) -> Measure:
    found = [
        f"{source.path}:{node.lineno} {node.name}: {length} lines"
        for source in sources
        for node in source.functions()
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) >= LONG_FUNCTION
    ]
    return Measure(f"functions of {LONG_FUNCTION} lines or more", len(found), 0, items=tuple(found))


def _most_parameters(sources: list[Source], goal: int = 7) -> Measure:
    counts = [
        (num_parameters(node), f"{source.path}:{node.lineno} {node.name}")
        for source in sources
        for node in source.functions()
        if not _is_aside(node)
    ]
    counts.sort(key=lambda entry: (-entry[0], entry[1]))
    above = tuple(f"{where}: {count}" for count, where in counts if count > goal)
    most, where = counts[0]
    return Measure("most parameters of a function", most, goal, note=where, items=above)


def num_parameters(node: Function) -> int:
    """All that a function takes, `*args` and `**kwargs` as one each, without `self` or `cls`."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    is_bound = bool(positional) and positional[0].arg in ("self", "cls")
    starred = (arguments.vararg is not None) + (arguments.kwarg is not None)
    return len(positional) - is_bound + len(arguments.kwonlyargs) + starred


def _is_aside(node: Function) -> bool:
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
        if name in _ASIDE_DECORATORS:
            return True
    return False
