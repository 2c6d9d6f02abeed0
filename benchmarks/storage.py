"""What the benchmarks store: a file per case, with GPU, versions, commit, settings and rows of figures."""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results")
"""What the documents' tables are made from."""

Result = dict[str, Any]
Row = dict[str, Any]

KEYS: Mapping[str, tuple[str, ...]] = {
    "backend": ("model", "batch"),
    "encoder": ("tower", "workload", "variant"),
    "towers": ("tower", "workload"),
    "vllm": ("tower", "workload", "variant"),
}
"""What tells rows of cases apart whose results may be merged. Those that share it are compared: they are of
one run."""

_ATTENTION_PACKAGES = (
    "flash-attn-4",
    "nvidia-cudnn-frontend",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "torch-c-dlpack-ext",
    "vllm",
)
_PACKAGES, _FASTER_ATTENTION = "attention packages", "flash-attn-4"
_CACHES = ("TORCHINDUCTOR", "TRITON", "FLASH_ATTENTION_CUTE_DSL")
_DIGITS = 5


def new_result(case: str) -> Result:
    """A result without rows: GPU, driver, versions and commit of this run.

    A host may have the files without the repository; there FXSPLIT_COMMIT names the commit.
    """
    import torch
    import transformers

    cuda = torch.cuda.is_available()
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"]) if (ROOT / ".git").exists() else None
    driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"])
    return {
        "case": case,
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": driver if cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        _PACKAGES: _attention_packages(),
        "python": platform.python_version(),
        "commit": os.environ.get("FXSPLIT_COMMIT") or commit,
        "settings": {},
        "rows": [],
    }


class Record:
    """The result of a run, whose file is written after every row.

    Args:
        case: by its name in `bench.CASES`.
        path: of the file; None: nothing is written.
    """

    def __init__(self, case: str, path: Path | None) -> None:
        self.result = new_result(case)
        self.settings: dict[str, Any] = self.result["settings"]
        self.rows: list[Row] = self.result["rows"]
        self.merge: Callable[[list[Row]], list[Row]] = list
        """From the rows that came to those that are stored."""
        self._path, self._came, self._writing = path, list[Row](), threading.Lock()

    def __call__(self, row: Row) -> None:
        """Adds a row, and prints it; from any thread."""
        with self._writing:
            print(*(f"{name}={value}" for name, value in row.items()), flush=True)
            self._came.append(row)
            self.rows[:] = self.merge(self._came)
            self.store()

    def all(self, rows: Iterable[Row], **names: Any) -> None:
        """Adds rows, which have these values too, as they come; a row of the error if they end with one."""
        whole: Row = {**names, "workload": "all"}
        with failing(whole):
            for row in rows:
                self({**names, **row})
        if "failure" in whole:
            self(whole)

    def store(self) -> None:
        """Writes the file again, after a change of what it has."""
        store(self._path, self.result)


def described(result: Mapping[str, Any], *more: str, rows: Iterable[Mapping[str, Any]] = ()) -> str:
    """Where figures are from, in one line; driver and further versions are in the stored result.

    Args:
        more: what they are of.
        rows: those that are shown, where a merged result has rows of several runs.
    """
    runs = [{**result, **row} for row in rows] or [result]
    commits = dict.fromkeys((run["commit"] or "unknown")[:9] for run in runs)
    attention = dict.fromkeys(run[_PACKAGES].get(_FASTER_ATTENTION) for run in runs)
    kernels = [f"{_FASTER_ATTENTION} {version}" if version else "torch's attention" for version in attention]
    versions = [f"torch {result['torch']}", *([" and ".join(kernels)] if any(attention) else [])]
    return ", ".join([result["gpu"] or "CPU", *more, *versions, f"commit {' and '.join(commits)}"])


def store(path: Path | None, result: Mapping[str, Any]) -> None:
    """Writes a file as a whole, so that a run that is cut off leaves the one before; None: nothing."""
    if path is None:
        return
    head = {name: value for name, value in result.items() if name != "rows"}
    rows = ",\n".join(f"  {json.dumps(_rounded(row))}" for row in result["rows"])
    text = json.dumps(_rounded(head), indent=1).removesuffix("\n}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(f'{text},\n "rows": [\n{rows}\n ]\n}}\n', encoding="utf-8")
    partial.replace(path)


def store_flat(path: Path, rows: Sequence[Row]) -> None:
    """Writes rows as a CSV file, of all columns that any of them has."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row))
        writer.writeheader()
        writer.writerows(_rounded(row) for row in rows)


def load(path: Path) -> Result:
    """What `store` wrote."""
    loaded: Result = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def merge(parts: Sequence[Result]) -> Result:
    """The results of several runs of a case as one; of rows that several have, those of the last run with
    all of them or with three, which are enough to compare. Rows keep the commit, and the packages, of theirs.

    Raises:
        ValueError: they are of another case, from other kinds of machine, versions or settings.
    """
    first = parts[0]
    key = KEYS.get(first["case"])
    if key is None:
        raise ValueError(
            f"results of {first['case']} are of one run; those of {', '.join(KEYS)} can be merged"
        )
    # Where all that is compared is of one run, runs may have other kernels.
    own = ["commit"] if "variant" in key else ["commit", _PACKAGES]
    differing = {
        name
        for part in parts
        for name in {*first, *part} - {*own, "rows"}
        if first.get(name) != part.get(name)
    }
    if differing:
        raise ValueError(f"these results cannot be merged; they differ in {', '.join(sorted(differing))}")
    found: dict[tuple[Any, ...], list[Row]] = {}
    for part in parts:
        of_part: dict[tuple[Any, ...], list[Row]] = {}
        for row in part["rows"]:
            of_part.setdefault(tuple(map(row.get, key)), []).append({**{n: part[n] for n in own}, **row})
        found |= {k: rows for k, rows in of_part.items() if len(rows) >= min(3, len(found.get(k, ())))}
    merged = list(itertools.chain.from_iterable(found.values()))
    of_all = {**first, **{name: parts[-1][name] for name in own}}
    for name in own:
        if all(row[name] == merged[0][name] for row in merged):
            of_all[name] = [row.pop(name) for row in merged][-1]
    return {**of_all, "rows": merged}


def one_line(error: Exception) -> str:
    """The kind of an error and the first line of its message: how a failure is stored."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextlib.contextmanager
def failing(row: Row) -> Iterator[None]:
    """An error inside is printed and becomes the "failure" of a row: what comes after goes on."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        row["failure"] = one_line(error)


def _rounded(value: Any) -> Any:
    """Five significant digits: a time has no more."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def _attention_packages() -> dict[str, str]:
    """Those of the optional ones that are installed."""
    found = {}
    for name in _ATTENTION_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def environment(first: Path, caches: Path | None = None) -> dict[str, str]:
    """That of a process which looks for modules in a folder first, with caches of compilers in another."""
    paths = [str(first), os.environ.get("PYTHONPATH", "")]
    own = {f"{name}_CACHE_DIR": str(caches / name) for name in _CACHES} if caches is not None else {}
    own |= {"XDG_CACHE_HOME": str(caches / "cache")} if caches is not None else {}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return {**os.environ, **own, "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
