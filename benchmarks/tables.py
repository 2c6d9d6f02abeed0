"""Takes results in, and writes every marked table of README.md and docs/ from benchmarks/results.

    python benchmarks/bench.py tables                          # writes the tables anew
    python benchmarks/bench.py tables out/readme.json          # stores this result first, in place of the old
    python benchmarks/bench.py tables a/towers.json b/towers.json   # two parts of one result

A result keeps the name of its file, and `TABLES` says which tables are made of it; others are read by
the ledger of features alone. A mark is
`<!-- table: NAME ARGUMENT -->` on a line of its own; what it marks ends at `<!-- end -->`. Nothing else is
touched but the README's claim. A test fails where a table is not what is stored.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import features
from storage import RESULTS, ROOT, Result, described, load, merge, store
from tabulate import tabulate

Row = Mapping[str, Any]

OURS = "ours-auto"
_INVARIANT = "ours-invariant"
_VARIANTS = ("eager", "compile", "compile-reduce-overhead", "compile-max-autotune", "graph-exact")
_TITLES = {
    "eager": "Hugging Face eager (sdpa)",
    "compile": "torch.compile",
    "compile-reduce-overhead": 'torch.compile, mode="reduce-overhead"',
    "compile-max-autotune": 'torch.compile, mode="max-autotune"',
    "graph-exact": "eager model in one CUDA graph",
    OURS: "ours",
    "powers of two": "our compiled program, one full graph per power of two, greedy packing",
}
_IN_VLLM = ("eager", "vllm", "ours", "ours-compiled")
_TOWER = "qwen3-vl-8b"
_NOT_MEASURED = "Not measured on a GPU yet."
_VLLM_IN_ENCODER = ("vllm-eager", "vllm")
_VLLM_NOTE = "vLLM's own tower, the better of its eager forward and its encoder manager"
_MEDIANS = "Milliseconds, medians."
_MIB, _GIB = 2**20, 2**30
_BEGIN = r"<!-- table: (?P<name>\w+)(?P<arguments>(?: [\w.-]+)*) -->\n"
# No other comment may stand in between, so a mark without an end does not swallow the next table.
_MARKED = re.compile(rf"(?P<begin>{_BEGIN})(?:(?!<!--).)*(?P<end><!-- end -->)", re.S)
_CLAIM = re.compile(r"on an? \w+ an image of 224 x 224 passes Qwen3-VL-8B's tower [\d.]+ times as fast")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", type=Path, metavar="JSON", help="results to take in")


def run(arguments: argparse.Namespace) -> int:
    take_in(arguments.files)
    for document in documents():
        text = rewritten(document)
        if text != document.read_text(encoding="utf-8"):
            document.write_text(text, encoding="utf-8")
            print(f"{document.relative_to(ROOT)}: rewritten")
    return 0


def take_in(files: Sequence[Path]) -> None:
    """Stores results under the names of their files; those of one name are merged.

    Raises:
        SystemExit: no table is made of such a file, or it was measured without a GPU.
    """
    by_name: dict[str, list[Result]] = {}
    for file in files:
        result = load(file)
        if file.stem not in result_names():
            raise SystemExit(f"{file}: no table is made of it; expected one of {', '.join(result_names())}")
        if result["gpu"] is None:
            raise SystemExit(f"{file}: was measured without a GPU; expected figures of one")
        by_name.setdefault(file.name, []).append(result)
    for name, parts in by_name.items():
        store(RESULTS / name, parts[0] if len(parts) == 1 else merge(parts))


def result_names() -> list[str]:
    """The results that a table is made of, and those that only the ledger of features reads."""
    read = [Path(feature.result["file"]).stem for feature in features.read_features()]
    return list(dict.fromkeys([*TABLES, *read]))


# --- documents


def documents() -> list[Path]:
    """Everything that may have marked tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def rewritten(document: Path, results: Path = RESULTS) -> str:
    """The text of a document, its tables as the results give them.

    Raises:
        ValueError: a mark names a table that does not exist, or has no end.
    """
    text = document.read_text(encoding="utf-8")
    if len(re.findall(_BEGIN, text)) != len(_MARKED.findall(text)):
        raise ValueError(
            f"{document.name}: a mark has no end: expected <!-- table: NAME --> ... <!-- end -->"
        )

    def table_of(match: re.Match[str]) -> str:
        if match["name"] == "features":
            return f"{match['begin']}\n{feature_rows(match['arguments'].strip())}\n\n{match['end']}"
        table = TABLES.get(match["name"])
        if table is None:
            raise ValueError(f"{document.name}: no table {match['name']}; there are {', '.join(TABLES)}")
        stored = results / f"{match['name']}.json"
        made = table(load(stored), *match["arguments"].split()) if stored.exists() else _NOT_MEASURED
        return f"{match['begin']}\n{made}\n\n{match['end']}"

    text = _MARKED.sub(table_of, text)
    return _CLAIM.sub(claim(load(results / "readme.json")), text)


def claim(result: Result) -> str:
    """What the README says first, of the smallest image."""
    times = _by_variant(result, _TOWER)["1x224"]
    gpu = result["gpu"].removeprefix("NVIDIA ").split()[0]
    # Of the figures as the table shows them, so that a reader who divides finds the same.
    ratio = float(shown(times["graph-exact"]["p50"])) / float(shown(times[OURS]["p50"]))
    return f"on an {gpu} an image of 224 x 224 passes Qwen3-VL-8B's tower {ratio:.2f} times as fast"


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def formatted(headers: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """A table; None is a dash, and columns of numbers are aligned to the right."""
    numeric = [all(isinstance(line[i], int | float | None) for line in lines) for i in range(len(headers))]
    return tabulate(
        [[shown(value) for value in line] for line in lines],
        headers,
        tablefmt="pipe",
        missingval="-",
        disable_numparse=True,
        colalign=["right" if each else "left" for each in numeric] if lines else None,
    )


def by_columns(columns: Mapping[str, str] | Iterable[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of some values of every row: headers, and the names of the values below them if they differ. A
    column that no row has is left out.
    """
    given = columns if isinstance(columns, Mapping) else {name: name for name in columns}
    named = {title: name for title, name in given.items() if any(name in row for row in rows)}
    return formatted(list(named), [[row.get(name) for name in named.values()] for row in rows])


def shown(value: Any) -> Any:
    """Three digits, and all digits of what is larger."""
    if not isinstance(value, float):
        return value
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


# --- encoder


def _of(result: Result, tower: str) -> list[Row]:
    return [row for row in result["rows"] if row["tower"] == tower]


def _by_variant(result: Result, tower: str) -> dict[str, dict[str, Row]]:
    """The rows of a tower by workload and variant."""
    found: dict[str, dict[str, Row]] = {}
    for row in _of(result, tower):
        if row["workload"] not in ("start", "all") and "variant" in row:
            found.setdefault(row["workload"], {})[row["variant"]] = row
    return found


def _times(rows: Mapping[str, Row]) -> dict[str, float | None]:
    return {name: row.get("p50") for name, row in rows.items()}


def _timed(names: Iterable[str], workloads: Mapping[str, Mapping[str, Row]]) -> list[str]:
    """Those of some variants that were timed."""
    return [name for name in names if any("p50" in rows.get(name, {}) for rows in workloads.values())]


def _timed_where(result: Result, tower: str) -> str:
    """Below a table of one tower's times."""
    seconds = {row["settled s"] for row in _of(result, tower) if "settled s" in row}
    after = f"{max(seconds, default=0):.0f} s of the same requests"
    settled = f", ours after {after}: token counts that recur are captured"
    where = described(result, result["settings"]["dtype"], "random weights", rows=_of(result, tower))
    return f"Milliseconds, medians{settled if seconds else ''}. {where}."


def readme(result: Result) -> str:
    """Ours beside what a user could run instead, vLLM's tower too if the run has it, in milliseconds."""
    workloads = _by_variant(result, _TOWER)
    others, has_vllm = _timed(_VARIANTS, workloads), bool(_timed(_VLLM_IN_ENCODER, workloads))
    headers = ["images", "patches", *(_TITLES[name] for name in others)]
    headers += [f"vLLM {result['vllm']}*"] if has_vllm else []
    has_starts = any("starts" in row for rows in workloads.values() for row in rows.values())
    headers += ["ours, all starts"] if has_starts else []
    lines = []
    for workload, rows in workloads.items():
        times = _times(rows)
        line = [workload, rows["eager"]["patches"], *map(times.get, others)]
        theirs = [time for name in _VLLM_IN_ENCODER if (time := times.get(name)) is not None]
        line += [min(theirs, default=None)] if has_vllm else []
        line += [_range(rows.get(OURS, {}))] if has_starts else []
        lines.append([*line, times.get(OURS), _ratio(times.get("eager"), times.get(OURS))])
    note = f" *: {_VLLM_NOTE}." if has_vllm else ""
    table = formatted([*headers, "ours", "eager / ours"], lines)
    return f"{table}\n\n{_timed_where(result, _TOWER)}{note}"


def _range(row: Row) -> str | None:
    """The least and the greatest median of the starts of a row; None if it has one start."""
    return f"{shown(row['starts'][0])}-{shown(row['starts'][-1])}" if "starts" in row else None


def summary(result: Result, tower: str) -> str:
    """The floor, the main variants and ours, milliseconds, and ours beside the floor and a CUDA graph."""
    workloads = _by_variant(result, tower)
    others = _timed(_VARIANTS, workloads)
    lines = []
    for workload, rows in workloads.items():
        times = _times(rows)
        ours, floor = times.get(OURS), times.get("floor")
        line = [workload, rows["eager"]["patches"], floor, *map(times.get, others), ours]
        lines.append([*line, _ratio(ours, floor), _ratio(times.get("graph-exact"), ours)])
    headers = ["workload", "patches", "floor", *others, "ours", "ours / floor", "graph-exact / ours"]
    return f"{formatted(headers, lines)}\n\n{_timed_where(result, tower)}"


def modes(result: Result) -> str:
    """Eager and our manager in every mode, milliseconds."""
    workloads = _by_variant(result, _TOWER)
    ours = dict.fromkeys(name for rows in workloads.values() for name in rows if name.startswith("ours-"))
    lines = [
        [workload, rows["eager"]["patches"], *map(_times(rows).get, ("eager", *ours))]
        for workload, rows in workloads.items()
    ]
    headers = ["workload", "patches", "eager", *(f"`{name.removeprefix('ours-')}`" for name in ours)]
    return _told(result, formatted(headers, lines), _MEDIANS, result["settings"]["dtype"], "random weights")


def encoder(result: Result) -> str:
    """Every figure of every tower, for the terminal."""
    names = ("tower", "workload", "variant", "p50", "p10", "p90", "host", "device", "first s", "bytes")
    names += ("padding", "error", "note", "skipped", "failure")
    return by_columns(names, [row for row in result["rows"] if row["workload"] != "start"])


# --- the other cases


def _told(result: Result, table: str, caption: str, *of: str, rows: Iterable[Row] = ()) -> str:
    """A table, what its figures are, and where they are from."""
    return f"{table}\n\n{caption}{' ' * bool(caption)}{described(result, *of, rows=rows)}."


def _grouped(rows: Iterable[Row], name: str) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups


def requests(result: Result) -> str:
    columns = {"": "title"} | {name: name for name in ("mean", "p50", "p99", "slowest / eager")}
    rows = [{**row, "title": _TITLES.get(row["variant"], row["variant"])} for row in result["rows"]]
    caption = f"Milliseconds, {result['rows'][0]['requests']} requests."
    return _told(result, by_columns(columns, rows), caption, result["settings"]["tower"])


def towers(result: Result) -> str:
    rows = [_tower_row(name, its_rows) for name, its_rows in _grouped(result["rows"], "tower").items()]
    columns = ["tower", "small", "medium", "large", "batch of 8", "error"]
    columns += ["compile s", "capture s", "GiB", "failure"]
    caption = "Eager / `manager.execute`, medians in milliseconds."
    return _told(result, by_columns(columns, rows), caption, rows=result["rows"])


def connector(result: Result, *parts: str) -> str:
    """A table for each part of the case that is named ("mix", "beside", "batch"), by default for all."""
    rows = _grouped(result["rows"], "part")
    first = {"p50": "first token p50", "p99": "first token p99"}
    media = {"media p50": "with media p50", "media p99": "with media p99"}
    text = {"lost": "lost", "longest step": "longest step"}
    columns = {
        "mix": {"mix": "mix", "": "variant", **first, **media, **text},
        "beside": {"text, beside": "beside", "videos": "videos", **first, **text, "step p50": "step p50"},
        "batch": {name: name for name in ("side", "one by one", "at once", "ratio", "a batch alone")},
    }
    made = "\n\n".join(by_columns(columns[part], rows[part]) for part in parts or rows)
    settings = result["settings"]
    of = (settings["tower"], f"{settings['rate']:g} requests a second")
    return _told(result, made, "Milliseconds.", *of, rows=result["rows"])


def invariant(result: Result) -> str:
    """What equal bits cost on every workload: the default beside `invariant`."""
    lines = []
    for workload, rows in _grouped((row for row in result["rows"] if "p50" in row), "workload").items():
        default, same = ({row["variant"]: row for row in rows}[name] for name in (OURS, _INVARIANT))
        line = {"images": workload, "default": default["p50"], "invariant": same["p50"]}
        line["ratio"] = same["p50"] / default["p50"]
        for what in ("padding", "error"):
            line |= {f"{what}, default": default[what], f"{what}, invariant": same[what]}
        lines.append(line)
    note = "Milliseconds, medians; padding: share of the computed tokens; error: relative, from eager."
    return _told(result, by_columns(list(lines[0]), lines), note, result["settings"]["dtype"])


def _tower_row(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    row: dict[str, Any] = {"tower": name}
    for measured in rows:
        if "failure" in measured:
            row["failure"] = measured["failure"]
        if "eager" in measured:
            sizes = measured["sizes"]
            size = f"{sizes[0]}: " if len(sizes) == 1 else ""
            row[measured["workload"]] = f"{size}{shown(measured['eager'])} / {shown(measured['ours'])}"
            row["error"] = f"{max(float(row.get('error', 0)), measured['rms error']):.2f}"
        elif "bytes" in measured:
            row |= {what: f"{measured[what]:.0f}" for what in ("compile s", "capture s")}
            row["GiB"] = f"{measured['bytes'] / _GIB:.1f}"
    return row


# Where a kernel is chosen, and which of its times counts there.
_CHOSEN_FOR = {
    "known lengths": ("known", "known"),
    "in a graph": ("captured", "captured"),
    "a batch in a graph": ("batch", "known"),
    "one segment in a graph": ("single", "known"),
}


def attention(result: Result) -> str:
    """Microseconds of torch's kernel at known lengths, and the one that each kind of call gets."""
    lines = []
    for segments, rows in _grouped(result["rows"], "segments").items():
        times = {row["kernel"]: row.get("known") for row in rows}
        chosen = [_chosen(rows, *where) for where in _CHOSEN_FOR.values()]
        lines.append([segments, times.get("torch_flash"), *chosen])
    heads = f"{result['settings']['heads']} heads of {result['settings']['head_dim']}"
    table = formatted(["segments", "`torch_flash`", *_CHOSEN_FOR], lines)
    caption = "Microseconds; what is chosen, in the last two columns with its time at known lengths."
    return _told(result, table, caption, "bf16", heads)


def _chosen(rows: Iterable[Row], where: str, time: str) -> str | None:
    """A kernel and its time; None: none is chosen there."""
    chosen = next((row for row in rows if where in row["chosen"].split(", ")), None)
    return None if chosen is None else f"`{chosen['kernel']}` {chosen[time]:.1f}"


def products(result: Result) -> str:
    """Microseconds of cuBLAS and of the chosen kernel."""
    lines = []
    for layer, of_layer in _grouped(result["rows"], "layer").items():
        for rows, found in _grouped(of_layer, "rows").items():
            times = {row["kernel"]: row.get("us") for row in found}
            chosen = [f"`{row['kernel']}` {row['us']:.1f}" for row in found if row["chosen"]]
            errors = [row["error"] for row in found if "error" in row]
            lines.append([layer, rows, times.get("cublas"), ", ".join(chosen), max(errors, default=None)])
    table = formatted(["layer", "rows", "`cublas`", "chosen", "largest error"], lines)
    return _told(result, table, "Microseconds of a call, weights from memory.", "bf16")


def passes(result: Result) -> str:
    """Milliseconds of one replay with all passes, without any and without each of them."""
    sizes = [str(count) for count in result["settings"]["patches"]]
    rows = [row for row in result["rows"] if not row["candidate"].startswith("pass ")]
    table = by_columns(["candidate", *sizes, "error", "failure"], rows)
    unit = result["settings"].get("unit", "patches")
    return _told(result, table, f"Milliseconds of one full graph replay, by {unit}.")


def kernels(result: Result) -> str:
    """Milliseconds of a request by kind of kernel, and their shares of the span."""
    kinds = ("products", "attention", "norms and pointwise", "copies", "gaps")

    def share(row: Row, kind: str) -> str:
        milliseconds = f"{row[kind]:#.3g}".rstrip(".")
        return f"{milliseconds} ({100 * row[kind] / row['span']:.0f} %)"

    lines = [row | {kind: share(row, kind) for kind in kinds} for row in result["rows"] if "span" in row]
    columns = ("tower", "workload", "variant", "patches", "p50", "span", *kinds)
    dtype = result["settings"]["dtype"]
    return _told(result, by_columns(columns, lines), _MEDIANS, dtype, "random weights")


def host(result: Result) -> str:
    table = by_columns({"host": "what", "microseconds": "us"}, result["rows"])
    return _told(result, table, "", result["settings"]["tower"])


def map_batches(result: Result) -> str:
    """`encode_images` beside the manager alone on the same GPUs, and what preparing takes."""
    prepare, *runs = result["rows"]
    named = {"files": "JPEG files", "prepared": "prepared pixels"}
    rows = [{**row, "from": named[row["way"]]} for row in runs]
    columns = {"from": "from", "GPUs": "actors", "images/s": "images/s"}
    table = by_columns({**columns, "`manager.execute` alone": "execute alone", "share": "share"}, rows)
    settings = result["settings"]
    caption = (
        f"{settings['images']} photographs of {settings['side']} pixels each way. One CPU prepares "
        f"{shown(prepare['images/s'])} a second: {shown(prepare['CPUs needed'])} CPUs keep these GPUs busy."
    )
    return _told(result, table, caption, settings["tower"])


def serve(result: Result) -> str:
    """Latency over HTTP by load, of all servers."""
    groups = _grouped(result["rows"], "model")
    servers = list(dict.fromkeys(row["server"] for row in result["rows"] if "images/s" in row))
    lines, notes = [], []
    for model, rows in groups.items():
        found = {(row["server"], row["share"]): row for row in rows}
        measured = [name for name in servers if (name, 1.0) in found and "images/s" in found[name, 1.0]]
        rates = ", ".join(f"{name} {shown(found[name, 1.0]['images/s'])}" for name in measured)
        notes.append(f"{model}: {rates} images/s.")
        notes += [f"{row['server']}: not measured, {row['reason']}." for row in rows if "reason" in row]
        for share in sorted({row["share"] for row in rows} - {1.0})[::2]:
            times = [found.get((name, share), {}).get(part) for name in servers for part in ("p50", "p99")]
            rate = next(found[name, share]["rate"] for name in measured if (name, share) in found)
            lines.append([model, f"{share:.0%}", rate, *times])
    columns = [f"{name}: {part}" for name in servers for part in ("p50", "p99")]
    note = f"Milliseconds; a server that cannot take the load has none. Capacity: {' '.join(notes)}"
    return _told(result, formatted(["tower", "load", "images/s", *columns], lines), note)


def accelerate(result: Result) -> str:
    ways = list(dict.fromkeys(row["way"] for row in result["rows"]))
    lines = []
    for name, rows in _grouped(result["rows"], "workload").items():
        times = {row["way"]: row["p50"] for row in rows}
        lines.append([name, *map(times.get, ways)])
    again = ""
    for what, said in {"generate": "Of `generate`, requests after the first", "captured": "In turn"}.items():
        made = [f"{name} {count}" for each in _made(result, what) for name, count in each.items()]
        again += f"{said}: {', '.join(dict.fromkeys(made))}." if made else ""
    return _told(result, formatted(["images", *ways], lines), f"{_MEDIANS} {again}")


def backend(result: Result) -> str:
    """A line for each model: this backend's time over that of the faster of torch's modes, and its error over
    eager's.
    """
    rows = [row for row in result["rows"] if "p50" in row]
    batches = sorted({row["batch"] for row in rows})
    lines = []
    for name, its_rows in sorted(_grouped(rows, "model").items()):
        line: list[Any] = [name]
        errors = []
        for batch in batches:
            found = {row["way"]: row for row in its_rows if row["batch"] == batch}
            modes = ("reduce-overhead", "max-autotune")
            times = [found[way]["p50"] for way in modes if way in found]
            ours, plain = found.get("encoder_cg", {}), found.get("eager", {})
            line.append(_ratio(ours.get("p50"), min(times, default=None)))
            errors.append(_ratio(ours.get("error"), plain.get("error") or None))
        lines.append([*line, max(filter(None, errors), default=None)])
    failures = [f"{row['model']}: {row['failure']}" for row in result["rows"] if "failure" in row]
    table = formatted(["model", *(f"batch {batch}" for batch in batches), "error"], lines)
    return _told(result, "\n\n".join([table, *failures]), "Ratios of medians.", rows=rows)


def embedding(result: Result) -> str:
    """Images a second of each way, and the share of the rate of a large matrix product that ours reaches."""
    rows = [row for row in result["rows"] if "p50" in row]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = []
    for name, of_model in _grouped(rows, "model").items():
        for batch, found in _grouped(of_model, "batch").items():
            times = {row["way"]: row["p50"] for row in found}
            speeds = [f"{batch / times[way] * 1e3:.0f}" if way in times else None for way in ways]
            floor = next(row["floor"] for row in found if "floor" in row)
            lines.append([name, batch, *speeds, f"{floor / times['encoder_cg']:.0%}"])
    note = "Images a second; share of the rate of a large matrix product."
    return _told(result, formatted(["tower", "batch", *ways, "share"], lines), note, rows=rows)


def _made(result: Result, what: str) -> list[dict[str, int]]:
    return [each for name, each in result["settings"].items() if name.startswith(what)]


def start(result: Result) -> str:
    rows = {row["start"]: row for row in result["rows"]}
    loads = ("load",) if "from file" in rows else ()
    columns = ("import", *loads, "compile", "capture", "first embedding", "total")
    names = [name for name in ("cold", "from file") if name in rows]
    notes = ["Seconds."]
    if not result["settings"].get("bytecode"):
        notes.append("Python's packages had no bytecode.")
    if "ready at once" in rows:
        row = rows["ready at once"]
        first = row["capture"] + row["first embedding"]
        notes.append(
            f"`capture(wait=False)`: the first embedding after {first:.1f} s, everything captured after "
            f"{row['done']:.1f}; of {row['requests']} requests until then the longest took "
            f"{row['longest request']:.1f} ms, the median {row['median request']:.1f}, "
            f"eager {row['eager']:.1f}."
        )
    lines = [[name, *map(rows[name].get, columns)] for name in names]
    return _told(result, formatted(["start", *columns], lines), " ".join(notes), result["settings"]["tower"])


def data_parallel(result: Result) -> str:
    columns = {"GPUs": "ranks", "`execute`, ms": "p50", "times as fast as one": "speed-up"}
    return _told(result, by_columns(columns, result["rows"]), "", result["settings"]["tower"])


def vllm(result: Result) -> str:
    """vLLM's classes eagerly, by its manager and by ours, milliseconds."""
    lines: list[list[Any]] = []
    errors: list[float] = []
    for tower in dict.fromkeys(row["tower"] for row in result["rows"]):
        for workload, rows in _by_variant(result, tower).items():
            times = _times(rows)
            theirs = min((time for name in ("eager", "vllm") if (time := times.get(name))), default=None)
            best = [_ratio(theirs, times.get(name)) for name in ("ours", "ours-compiled")]
            errors += [row["error"] for row in rows.values() if "error" in row]
            lines.append([tower, workload, *map(times.get, _IN_VLLM), *best])
    headers = ["encoder", "workload", "vLLM eager", "vLLM's manager", "ours, its kernels"]
    headers += ["ours, `compile: true`", "vLLM's best / ours", "/ compiled"]
    caption = f"Milliseconds, medians; root mean square difference from eager: up to {max(errors):.1e}."
    of = (f"vLLM {result['vllm']}", result["settings"]["dtype"], "random weights")
    return _told(result, formatted(headers, lines), caption, *of, rows=result["rows"])


def vllm_serving(result: Result) -> str:
    """Milliseconds to the first token by what requests bring, a line for each variant."""
    rows = [dict(row) for row in result["rows"] if "p50" in row]
    for row in rows:
        if each := row.get("p50 by engine"):
            row["p50 by engine"] = " / ".join(f"{p50:#.3g}".rstrip(".") for p50 in each)
    same = all(row.get("same") == 1.0 for row in rows)
    columns = {"requests": "requests", "a second": "rate", "encoder": "variant"}
    columns |= {name: name for name in ("p50", "p50 by engine", "p99", "encoder host", "encoder device")}
    columns |= {"requests / s": "requests per second"} | ({} if same else {"same tokens": "same"})
    table = by_columns(columns, sorted(rows, key=lambda row: str(row["requests"])))
    caption = f"Milliseconds to the first token{', which is the same of all' if same else ''}."
    of = (f"vLLM {result['vllm']}", result["settings"]["dtype"], "random weights")
    return _told(result, table, caption, *of)


# --- features


def feature_rows(kind: str) -> str:
    """The features of a kind with what they gain; of the kind `lost` what was tried."""
    if kind == "lost":
        return formatted(["tried", "found"], [*features.read_lost().items()])
    lines = []
    for feature in features.read_features():
        if feature.kind != kind:
            continue
        with_it, *without = feature.values()
        unit, result = feature.result["unit"], load(RESULTS / feature.result["file"])
        figure = f"{shown(with_it)} {unit}" + (f", {shown(without[0])} without" if without else "")
        linked = f"[{figure}](../benchmarks/results/{feature.result['file']})"
        gpu = result["gpu"].removeprefix("NVIDIA ").split()[0]
        lines.append(
            [f"`{feature.name}`", feature.purpose, feature.user, f"{linked}: {_where(feature)}, {gpu}"]
        )
    return formatted([kind, "for", "who needs it", "measured"], lines)


def _where(feature: features.Feature) -> str:
    """What the two measured rows have in common, and the value that was read."""
    both = feature.result["with"].items() & feature.result.get("without", feature.result["with"]).items()
    return ", ".join([*map(str, dict(sorted(both)).values()), feature.result["value"]])


TABLES: Mapping[str, Callable[..., str]] = {
    **dict.fromkeys(("readme", "torch_2_14"), readme),
    **dict.fromkeys(("encoder", "internvl"), summary),
    "modes": modes,
    "requests": requests,
    "towers": towers,
    "attention": attention,
    "products_activations": products,
    "passes": passes,
    "host": host,
    "backend": backend,
    "embedding": embedding,
    **dict.fromkeys(("accelerate", "accelerate_adapters"), accelerate),
    **dict.fromkeys(("start", "start_slow_host"), start),
    **dict.fromkeys(("connector", "connector_slices", "connector_own_gpu"), connector),
    "invariant": invariant,
    "data_parallel": data_parallel,
    "kernels": kernels,
    **dict.fromkeys(("vllm", "vllm_towers", "vllm_h100"), vllm),
    **dict.fromkeys(("vllm_serving_pairs", "vllm_serving_compiled"), vllm_serving),
    "map_batches": map_batches,
    **dict.fromkeys(("serve", "serve_qwen3_vl"), serve),
}
"""Makes Markdown from a result and the arguments of a mark. A name is that of the mark and of the file in
benchmarks/results.
"""
