"""Measure the size and order of the repository, and compare each figure with the ledger in `house.toml`.

    python -m tests.house            prints every figure, its ledger entry and its goal
    python -m tests.house --write    also writes figures that have become better into the ledger

A figure that is worse than its entry fails `tests/test_house.py`, and so does one that is better and not
written down. An entry may be raised by hand; it then needs a `reason`, since it is above its own `lowest`.

Figures are counted from syntax trees and the import graph of the whole package, without exception, and from
the call stacks of a tiny tower that is captured and replayed on a CPU. On a GPU the same calls lie above a
CUDA graph.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import inspect
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
LEDGER = Path(__file__).with_name("house.toml")
PACKAGE = "fxsplit_encoder"
SIDE_HOUSES = ("cli", "connector", "encode_queue", "integrations", "media", "models", "service", "tuning")
"""Rooms that the core does not import."""
SMALL_FILE, LONG_FUNCTION = 60, 80
BANNED = (
    *("whoever", "nobody", "somebody", "meanwhile", "beside", "lent", "riddle", "told", "tells of"),
    *("in vain", "of no matter", "the very", "spoil"),
)
"""Words that name no actor or mechanism of the field."""
_MUTATORS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end", "pop", "popitem"),
    *("remove", "setdefault", "update"),
}

Arrow = tuple[str, str]
Frame = tuple[str, CodeType]
"""A module and the code of a function in it."""


@dataclass(frozen=True)
class Figure:
    """A number of which less is better, and what was counted."""

    value: int
    items: tuple[str, ...] = ()


def measure() -> dict[str, Figure]:
    """Every figure, by the name of its entry in the ledger."""
    sources = _sources(ROOT / PACKAGE)
    figures = _sizes(sources) | _syntax(sources) | _imports() | _registries() | _stacks()
    return {name: each if isinstance(each, Figure) else Figure(each) for name, each in figures.items()}


# --- files and lines


def _sources(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*.py") if ".venv" not in str(path))
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in paths}


def _is_side(path: str) -> bool:
    parts = Path(path).with_suffix("").parts
    return parts[0] in SIDE_HOUSES


def _room(path: str) -> str:
    parts = Path(path).parts
    if parts[0] == "integrations" and len(parts) > 2:
        return f"integrations/{parts[1]}"
    if len(parts) > 1 or _is_side(path):
        return Path(path).with_suffix("").parts[0]
    return "face"


def _lines(sources: Mapping[str, str]) -> int:
    return sum(text.count("\n") for text in sources.values())


def _sizes(sources: Mapping[str, str]) -> dict[str, Figure | int]:
    core = {path: text for path, text in sources.items() if not _is_side(path)}
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    rooms: dict[str, dict[str, str]] = {}
    for path, text in sources.items():
        rooms.setdefault(_room(path), {})[path] = text
    sizes: dict[str, Figure | int] = {
        "package files": len(sources),
        "package lines": _lines(sources),
        "core files": len(core),
        "core lines": _lines(core),
        "test lines": _lines(_sources(ROOT / "tests")),
        "benchmark lines": _lines(_sources(ROOT / "benchmarks")),
        "words of pages": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
        f"files below {SMALL_FILE} lines": sum(text.count("\n") < SMALL_FILE for text in sources.values()),
    }
    for room, files in sorted(rooms.items()):
        sizes[f"room {room}: files"], sizes[f"room {room}: lines"] = len(files), _lines(files)
    return sizes


# --- syntax


def _syntax(sources: Mapping[str, str]) -> dict[str, Figure | int]:
    trees = {path: ast.parse(text) for path, text in sources.items()}
    own = {name for tree in trees.values() for node in _walked(tree) for name in _private_names(node)}
    tests = {path: ast.parse(text) for path, text in _sources(ROOT / "tests").items() if _names(text) & own}
    names = Counter(Path(path).name for path in sources)
    twice = [name for name, count in names.items() if count > 1 and not name.startswith("__")]
    return {
        "module names twice": Figure(sum(names[name] - 1 for name in twice), tuple(sorted(twice))),
        "broad excepts": _found(trees, _is_broad),
        "type: ignore": sum(text.count("type: ignore") for text in sources.values()),
        "module globals that change": _changing_globals(trees),
        "settings": _settings(trees),
        f"functions of {LONG_FUNCTION} lines": _found(trees, _is_long),
        "most parameters of a function": max(map(_num_parameters, _functions(trees))),
        "process-wide switches outside _torch": _found(
            {path: tree for path, tree in trees.items() if not path.startswith("_torch/")}, _switches_process
        ),
        "docstrings with banned words": _banned(trees),
        "private names that tests touch": _found(tests, functools.partial(_touches_private, own=own)),
    }


def _names(text: str) -> set[str]:
    """The private names in a text, most of which need no syntax tree to be passed over."""
    return set(re.findall(r"(?<!\w)_[^\W_]\w*", text))


@functools.cache
def _walked(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a file's tree, which most figures look at."""
    return tuple(ast.walk(tree))


def _found(trees: Mapping[str, ast.AST], counts: Callable[[ast.AST], bool]) -> Figure:
    items = [
        f"{path}:{getattr(node, 'lineno', 0)}"
        for path, tree in trees.items()
        for node in _walked(tree)
        if counts(node)
    ]
    return Figure(len(items), tuple(items))


def _is_broad(node: ast.AST) -> bool:
    if not isinstance(node, ast.ExceptHandler):
        return False
    kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException"))
        for kind in kinds
    )


def _is_long(node: ast.AST) -> bool:
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return is_function and (node.end_lineno or node.lineno) - node.lineno + 1 >= LONG_FUNCTION


def _functions(trees: Mapping[str, ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for tree in trees.values():
        for node in _walked(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel_or_command(node):
                yield node


def _is_kernel_or_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Parameters of Triton kernels and of a command's verbs are no reader's burden."""
    called = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    names = {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in called}
    return not names.isdisjoint({"jit", "autotune", "heuristics", "command"})


def _num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """All that a function takes, `*args` and `**kwargs` as one each, without `self` or `cls`."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    is_bound = bool(positional) and positional[0].arg in ("self", "cls")
    starred = (given.vararg is not None) + (given.kwarg is not None)
    return len(positional) - is_bound + len(given.kwonlyargs) + starred


def _switches_process(node: ast.AST) -> bool:
    """Calls that change the interpreter for the whole process."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
    changes_sys = owner == "sys" and node.func.attr.startswith("set")
    return changes_sys or (owner == "gc" and node.func.attr in ("freeze", "unfreeze", "disable", "enable"))


def _banned(trees: Mapping[str, ast.AST]) -> Figure:
    words = re.compile(rf"\b({'|'.join(BANNED)})\b")
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    items = [
        f"{path}:{getattr(node, 'lineno', 1)} {match[0]}"
        for path, tree in trees.items()
        for node in _walked(tree)
        if isinstance(node, documented) and (match := words.search(ast.get_docstring(node) or ""))
    ]
    return Figure(len(items), tuple(items))


def _changing_globals(trees: Mapping[str, ast.Module]) -> Figure:
    """Names of a module that its functions assign by `global`, or whose containers they change."""
    items = []
    for path, tree in trees.items():
        at_top = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        functions = [n for n in _walked(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        changed = {name for each in functions for node in ast.walk(each) for name in _changed_by(node)}
        items += [f"{path}: {name}" for name in sorted(at_top & changed)]
    return Figure(len(items), tuple(items))


def _changed_by(node: ast.AST) -> Iterable[str]:
    match node:
        case ast.Global(names=names):
            return names
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in _MUTATORS:
            return [name]
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
            return [name]
    return ()


def _settings(trees: Mapping[str, ast.Module]) -> Figure:
    """Fields of the models that derive from `Settings`."""
    nodes = (node for tree in trees.values() for node in _walked(tree))
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}

    def derives(node: ast.ClassDef) -> bool:
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        return "Settings" in bases or any(base in classes and derives(classes[base]) for base in bases)

    items = [
        f"{name}.{field.target.id}"
        for name, node in classes.items()
        if derives(node)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if "ClassVar" not in ast.unparse(field.annotation)
    ]
    return Figure(len(items), tuple(items))


def _private_names(node: ast.AST) -> Iterable[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            names = [name]
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
            names = [name]
        case ast.Name(id=name, ctx=ast.Store()):
            names = [name]
        case _:
            names = []
    return [name for name in names if name.startswith("_") and not name.startswith("__")]


def _touches_private(node: ast.AST, own: set[str]) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls" | "torch")) | ast.Attribute(attr="_replace"):
            return False  # `_replace` is the public method of a NamedTuple
        case ast.Attribute(attr=name):
            return name in own
        case ast.ImportFrom(module=str(module), names=names) if module.startswith(PACKAGE):
            return any(alias.name in own for alias in names)
    return False


# --- imports


@functools.cache
def read_floors() -> dict[str, int]:
    """The height of every room, from 0, by the layers contract of import-linter in `pyproject.toml`."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["type"] == "layers")
    heights = enumerate(reversed(layers))
    return {name: height for height, names in heights for name in re.findall(r"\w+", names)}


def _imports() -> dict[str, Figure | int]:
    import grimp

    graph = grimp.build_graph(PACKAGE, cache_dir=None)  # with imports for annotations
    arrows = {
        (_short(module), _short(imported))
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    }
    importers = Counter(imported for _, imported in arrows)
    packages = {_short(module) for module in graph.modules if graph.find_children(module)}
    once = [name for name, count in importers.items() if count == 1 and name not in packages]
    upward = [f"{a} -> {b}" for a, b in sorted(arrows) if a and _height(a) < _height(b)]
    sides = [
        f"{a} -> {b}"
        for a, b in sorted(arrows)
        if a and not _is_side(a.replace(".", "/")) and _is_side(b.replace(".", "/"))
    ]
    found = circles(arrows)
    return {
        "import circles": Figure(len(found), tuple(map(", ".join, found))),
        "upward imports": Figure(len(upward), tuple(upward)),
        "imports of side houses by the core": Figure(len(sides), tuple(sides)),
        "files with one importer": len(once),
    }


def _short(module: str) -> str:
    return module.removeprefix(PACKAGE).removeprefix(".")


def _height(module: str) -> int:
    return read_floors().get(module.partition(".")[0], -1)


def circles(arrows: Iterable[Arrow]) -> list[tuple[str, ...]]:
    """Groups of modules of which each reaches every other (strongly connected components above one)."""
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
    found: set[str] = set()
    ahead = [start]
    while ahead:
        for module in after.get(ahead.pop(), set()) - found:
            found.add(module)
            ahead.append(module)
    return found


# --- what is registered


def _registries() -> dict[str, Figure | int]:
    from fxsplit_encoder.compile.passes import PASSES
    from fxsplit_encoder.kernels.attention import KERNELS as attention
    from fxsplit_encoder.kernels.products.measured import KERNELS as products

    kernels = {"attention kernels": attention, "product kernels": products, "passes": PASSES}
    return {name: Figure(len(each), tuple(map(str, each))) for name, each in kernels.items()}


# --- call stacks


def _stacks() -> dict[str, Figure | int]:
    """Functions of the package between an entry point and `SegmentedCapture.replay`, which calls the graph's;
    and those between `capture` and the recording of a piece. Comprehensions are left out.
    """
    import fxsplit_encoder as fx
    from fxsplit_encoder.hugging_face import ServedTower

    manager = fx.EncoderCudaGraphManager
    with _watched("replay") as replays, _watched("captured") as recordings:
        _capture_and_execute()
    with _watched("replay") as calls:
        _accelerate_and_call()
    capture = _deepest(recordings, manager.capture)
    return {
        "hops from execute to replay": _shown(_deepest(replays, manager.execute)),
        "hops from an accelerated call to replay": _shown(_deepest(calls, ServedTower.__call__)),
        "frames of the capture stack": _shown(capture),
        "generators in the capture stack": _shown(
            [frame for frame in capture if frame[1].co_flags & inspect.CO_GENERATOR]
        ),
    }


def _capture_and_execute() -> None:
    """Take a tiny tower through `capture` and two calls of `execute` in both modes, compiled once."""
    import fxsplit_encoder as fx
    from fxsplit_encoder.models.random import random_inputs

    wrapped = fx.wrap(_tiny_tower())
    limits = {"token_budgets": (16,), "max_items_per_batch": 2, "max_frames_per_batch": 0}
    program = None
    for mode in ("full", "piecewise"):
        config = fx.EncoderConfig(mode=mode, piece_compiler="eager", **limits)
        manager = fx.EncoderCudaGraphManager(wrapped, config, log_interval=0)
        if program is not None:
            manager.paths["default"].bind(program)
        manager.capture()
        program = manager.programs["default"]
        for sizes in ([16], [16, 32]):  # patches, four a token
            manager.execute(random_inputs(wrapped, sizes))
        manager.clear()


def _accelerate_and_call() -> None:
    import torch

    import fxsplit_encoder as fx

    tower = fx.accelerate(_tiny_tower(), fx.EncoderConfig(piece_compiler="eager", token_budgets=(16,)))
    with torch.no_grad():
        for _ in range(2):
            tower(torch.zeros(16, 1536), grid_thw=torch.tensor([[1, 4, 4]]))
    fx.restore(tower)


def _tiny_tower() -> Any:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 96}
    config = Qwen3VLVisionConfig(depth=1, deepstack_visual_indexes=[0], **sizes)
    return Qwen3VLVisionModel(config).requires_grad_(False).train(False)


@contextlib.contextmanager
def _watched(method: str) -> Iterator[list[list[Frame]]]:
    """Collect the stack of every call of a method of `SegmentedCapture`, that call included."""
    from fxsplit_encoder.capture.breakable import SegmentedCapture

    original = getattr(SegmentedCapture, method)
    stacks: list[list[Frame]] = []

    @functools.wraps(original)
    def watching(*args: Any, **kwargs: Any) -> Any:
        stacks.append([*_stack(), (SegmentedCapture.__module__, original.__code__)])
        return original(*args, **kwargs)

    with mock.patch.object(SegmentedCapture, method, watching):
        yield stacks


def _stack() -> list[Frame]:
    frames: list[Frame] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if module.partition(".")[0] == PACKAGE and not code.co_name.startswith("<"):
            frames.append((module, code))
        frame = frame.f_back
    return frames[::-1]


def _deepest(stacks: list[list[Frame]], function: Callable[..., Any]) -> list[Frame]:
    """The longest of the stacks, from a function on."""
    code = inspect.unwrap(function).__code__
    below = [stack[[c for _, c in stack].index(code) :] for stack in stacks if code in [c for _, c in stack]]
    assert below, f"{function.__qualname__} reached none of the watched calls"
    return max(below, key=len)


def _shown(stack: list[Frame]) -> Figure:
    return Figure(len(stack), tuple(f"{_short(module)}: {code.co_qualname}" for module, code in stack))


# --- the ledger


@dataclass(frozen=True)
class Entry:
    """What the ledger says of one figure."""

    value: int
    lowest: int
    goal: int | None = None
    reason: str = ""


def read_ledger(path: Path = LEDGER) -> dict[str, Entry]:
    """The entries by the names of their figures."""
    return {name: Entry(**entry) for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items()}


def problems(figures: Mapping[str, Figure], ledger: Mapping[str, Entry]) -> list[str]:
    """What is worse than the ledger, not written down, or raised without a reason."""
    wrong = [f"{name}: not in the ledger; run make house" for name in figures.keys() - ledger.keys()]
    wrong += [f"{name}: in the ledger, and measured no more" for name in ledger.keys() - figures.keys()]
    for name in sorted(figures.keys() & ledger.keys()):
        value, entry = figures[name].value, ledger[name]
        if value > entry.value:
            wrong.append(f"{name}: {value}, worse than {entry.value}; lower it, or raise it with a reason")
        elif value < entry.value:
            wrong.append(f"{name}: {value}, better than {entry.value}; run make house, which writes it down")
        if entry.value > entry.lowest and not entry.reason:
            wrong.append(f"{name}: raised from {entry.lowest} to {entry.value} without a reason")
    return wrong


def improved(figures: Mapping[str, Figure], ledger: Mapping[str, Entry]) -> dict[str, Entry]:
    """The ledger with every figure that is new or better; worse ones stay as they are, for a person."""
    entries = {}
    for name, figure in figures.items():
        old = ledger.get(name, Entry(figure.value, figure.value))
        value, lowest = min(old.value, figure.value), min(old.lowest, figure.value)
        entries[name] = Entry(value, lowest, old.goal, old.reason if value > lowest else "")
    return entries


def written(ledger: Mapping[str, Entry]) -> str:
    """The ledger as TOML."""
    lines = ["# The figures of tests/house.py; less is better. `make house` writes those that became better."]
    for name, entry in ledger.items():
        parts = [f"value = {entry.value}", f"lowest = {entry.lowest}"]
        parts += [f"goal = {entry.goal}"] if entry.goal is not None else []
        parts += [f'reason = "{entry.reason}"'] if entry.reason else []
        lines.append(f'"{name}" = {{ {", ".join(parts)} }}')
    return "\n".join([*lines, ""])


def main() -> int:
    """Print the figures; 1 if the ledger does not hold."""
    from tabulate import tabulate

    parser = argparse.ArgumentParser(prog="house", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write better figures into the ledger")
    parser.add_argument("--verbose", metavar="FIGURE", help="list what a figure counts")
    given = parser.parse_args()
    figures, ledger = measure(), read_ledger()
    if given.verbose:
        print("\n".join(figures[given.verbose].items))
        return 0
    if given.write:
        ledger = improved(figures, ledger)
        LEDGER.write_text(written(ledger), encoding="utf-8")
    rows = [
        (name, figure.value, entry.value, entry.goal if entry.goal is not None else "", entry.reason)
        for name, figure in figures.items()
        for entry in [ledger.get(name, Entry(0, 0))]
    ]
    print(tabulate(rows, headers=("figure", "now", "ledger", "goal", "reason"), disable_numparse=True))
    wrong = problems(figures, ledger)
    print("\n".join(["", *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
