"""The import graph: circles, and arrows from a floor to one above it.

The floors are those of the layers contract of import-linter in `pyproject.toml`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping

import grimp

from house.measure import PACKAGE, ROOT, Measure

Arrow = tuple[str, str]


def read_floors() -> dict[str, int]:
    """The height of every module directly below the package, from 0; the package's `__init__` is the top.

    Raises:
        LookupError: `pyproject.toml` has no contract of layers for the package.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for contract in settings["tool"]["importlinter"]["contracts"]:
        if contract["type"] == "layers" and PACKAGE in contract["containers"]:
            layers = list(enumerate(reversed(contract["layers"])))
            floors = {name: height for height, names in layers for name in re.findall(r"\w+", names)}
            return {**floors, "": len(layers)}
    raise LookupError(f"pyproject.toml: no contract of type 'layers' has {PACKAGE} among its containers")


def height_of(module: str, floors: dict[str, int]) -> int:
    """How high a module of the package lies; the package's own `__init__` has the empty name.

    Raises:
        KeyError: no floor names it.
    """
    return floors[module.removeprefix(PACKAGE).removeprefix(".").partition(".")[0]]


def measure_imports() -> list[Measure]:
    """Circles and upward arrows, of imports that run and of those for annotations alone."""
    runs = _arrows(exclude_type_checking_imports=True)
    annotations = _arrows(exclude_type_checking_imports=False) - runs
    floors = _with_front(read_floors(), runs | annotations)
    circles, package_circles = _circles(runs), _package_circles(runs)
    with_annotations = [circle for circle in _circles(runs | annotations) if circle not in circles]
    return [
        Measure("import circles of modules", len(circles), 0, items=_lines(circles)),
        Measure(
            "import circles of neighbors in a package", len(package_circles), 0, items=_lines(package_circles)
        ),
        _upward("upward imports", runs, floors, goal=0),
        Measure(
            "... circles only with annotations' imports",
            len(with_annotations),
            items=_lines(with_annotations),
        ),
        _upward("... upward imports for annotations alone", annotations, floors, goal=None),
    ]


def _arrows(*, exclude_type_checking_imports: bool) -> set[Arrow]:
    """Every import, from a module to one that it names, those inside functions too."""
    graph = grimp.build_graph(
        PACKAGE, exclude_type_checking_imports=exclude_type_checking_imports, cache_dir=None
    )
    return {
        (module, imported)
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    }


def _with_front(floors: dict[str, int], arrows: set[Arrow]) -> dict[str, int]:
    """No floor names the package's `__init__`: it stands on the highest floor that it imports, if only when a
    name is used, so that those above may import it.
    """
    imported = [height_of(after, floors) for before, after in arrows if before == PACKAGE]
    return {**floors, "": max(imported, default=0)}


def _upward(name: str, arrows: set[Arrow], floors: dict[str, int], goal: int | None) -> Measure:
    up = sorted(arrow for arrow in arrows if height_of(arrow[0], floors) < height_of(arrow[1], floors))
    return Measure(name, len(up), goal, items=tuple(f"{_short(a)} -> {_short(b)}" for a, b in up))


def _package_circles(arrows: set[Arrow]) -> list[tuple[str, ...]]:
    """Circles among the direct children of each package, each child with all that is below it."""
    levels: dict[str, set[Arrow]] = {}
    for importer, imported in arrows:
        if parted := _part(importer, imported):
            package, arrow = parted
            levels.setdefault(package, set()).add(arrow)
    return sorted(circle for level in levels.values() for circle in _circles(level))


def _part(importer: str, imported: str) -> tuple[str, Arrow] | None:
    """The package in which two modules part, and its children on either side. None: one holds the other."""
    first, second = importer.split("."), imported.split(".")
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    if common == min(len(first), len(second)):
        return None
    return ".".join(first[:common]), (".".join(first[: common + 1]), ".".join(second[: common + 1]))


def _circles(arrows: Iterable[Arrow]) -> list[tuple[str, ...]]:
    """Groups of modules of which each reaches every other (strongly connected, and more than one)."""
    after: dict[str, set[str]] = {}
    for importer, imported in arrows:
        after.setdefault(importer, set()).add(imported)
    reached = {module: _reachable(module, after) for module in after}
    groups = {
        tuple(sorted(other for other in found if module in reached.get(other, ())))
        for module, found in reached.items()
        if module in found
    }
    return sorted(groups)


def _reachable(start: str, after: Mapping[str, set[str]]) -> set[str]:
    """All modules that are one or more imports away."""
    found: set[str] = set()
    ahead = [start]
    while ahead:
        for module in after.get(ahead.pop(), set()) - found:
            found.add(module)
            ahead.append(module)
    return found


def _short(module: str) -> str:
    return module.removeprefix(f"{PACKAGE}.")


def _lines(circles: list[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(", ".join(map(_short, circle)) for circle in circles)
