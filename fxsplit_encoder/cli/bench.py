"""`encoder-cg bench`: what a user would gain on a GPU with images of their own."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import fxsplit_encoder as fx
from fxsplit_encoder.capture.forward import measure_ms
from fxsplit_encoder.cli.console import progress_bars, say_tower
from fxsplit_encoder.cli.document import Document
from fxsplit_encoder.cli.tower import Batch, ChosenTower
from fxsplit_encoder.cli.ways import WAYS
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.eager import rms_error
from fxsplit_encoder.models.prepare import EncoderInputs

OURS = "ours"

# Less is within the noise of a measurement.
_WORTH = 1.05


@dataclass
class Measured:
    """One batch by every way."""

    batch: Batch
    ms: dict[str, float] = field(default_factory=dict)
    """Milliseconds by the way's name; one that failed or cannot run is not in it."""

    @property
    def best_other(self) -> tuple[str, float] | None:
        """The fastest of the others, and its time; None: nothing else was measured."""
        others = {name: ms for name, ms in self.ms.items() if name != OURS}
        return min(others.items(), key=lambda each: each[1]) if others else None

    @property
    def gain(self) -> float | None:
        """How many times as fast ours is as the best of the others; None: not both were measured."""
        best = self.best_other
        return self.times_of(best[0]) if best else None

    def times_of(self, way: str) -> float | None:
        """How many times as fast ours is as one way; None: not both were measured."""
        return self.ms[way] / self.ms[OURS] if way in self.ms and OURS in self.ms else None


def advice(rows: Sequence[Measured], titles: Mapping[str, str]) -> str:
    """Returns one line of advice: use the manager, another way, or neither."""
    gains = {index: gain for index, row in enumerate(rows) if (gain := row.gain) is not None}
    if not gains:
        return "No advice: ours or everything else was not measured."
    worth = {index: gain for index, gain in gains.items() if gain >= _WORTH}
    others = [rows[index] for index, gain in gains.items() if gain < _WORTH]
    if not worth:
        return f"Nothing to gain on these images: {_bests(others, titles)} is as fast."
    found = f"Use the manager: {_range([*worth.values()])} times as fast as the best other way"
    eager = [times for index in worth if (times := rows[index].times_of("eager")) is not None]
    if eager:
        found += f", {_range(eager)} times as fast as eager"
    if not others:
        return f"{found}."
    named = ", ".join(row.batch.row["item"] for row in others)
    return f"{found}; nothing to gain on {named}, where {_bests(others, titles)} is as fast."


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _bests(rows: Sequence[Measured], titles: Mapping[str, str]) -> str:
    names = dict.fromkeys(titles[best[0]] for row in rows if (best := row.best_other) is not None)
    return " or ".join(names)


# Each size takes a compilation of its own in one of the ways.
_MOST_ALONE = 6
_REPEATS = 30

# What torch, a compiler or a tower raise.
_OF_A_WAY = (
    *(RuntimeError, AssertionError, AttributeError, ImportError, LookupError),
    *(ArithmeticError, OSError, TypeError, ValueError),
)

# Above it an output is wrong and not just rounded: root mean square of the difference from eager's.
_ERROR_LIMITS = {torch.float32: 1e-3}
_ERROR_LIMIT = 0.1


def run_bench(
    chosen: ChosenTower,
    images: Sequence[Path],
    config: fx.EncoderConfig | None,
    ways: Sequence[str],
    document: Document,
) -> None:
    """Times images (none: the examples), each size alone and all together, by every way; says what is gained.
    InputError: a file is not usable.
    """
    inputs = chosen.inputs(images)
    say_tower(document, chosen)
    is_cuda = chosen.device.type == "cuda"
    rows = [Measured(batch) for batch in _batches(chosen, inputs, document)]
    runnable = [name for name in ways if is_cuda or not WAYS[name].needs_cuda]
    document.notes([f"{WAYS[name].title} needs a GPU" for name in ways if name not in runnable])
    seconds = _measure_all(chosen, config or fx.EncoderConfig(), runnable, rows, document)
    titles = {name: WAYS[name].title for name in sorted(runnable, key=lambda name: name == OURS)}
    starts = ", ".join(f"{titles[name]} {seconds[name]:.1f} s" for name in titles if name in seconds)
    document.facts({"start": f"{starts} (compiling, capturing, first runs)"})
    document.say()
    is_compared = is_cuda and OURS in titles and len(titles) > 1
    _say_rows(document, rows, titles, is_compared=is_compared)
    said = advice(rows, titles) if is_cuda else "No advice: without a GPU these times say nothing about one."
    document.put("advice", said, f"\n{said}")


def _batches(chosen: ChosenTower, inputs: EncoderInputs, document: Document) -> list[Batch]:
    """Every size alone, at most `_MOST_ALONE` from the smallest to the largest, and everything together."""
    tokens = chosen.tokens(inputs)
    sizes: dict[tuple[str, int], int] = {}
    for index, item in enumerate(inputs.items):
        sizes.setdefault((str(item.layout), item.frames), index)
    alone = sorted(sizes.values(), key=lambda index: tokens[index])
    if len(alone) > _MOST_ALONE:
        step = (len(alone) - 1) / (_MOST_ALONE - 1)
        document.notes([f"of {len(alone)} sizes {_MOST_ALONE} are measured alone, from smallest to largest"])
        alone = [alone[round(step * n)] for n in range(_MOST_ALONE)]
    batches = chosen.batches(inputs, alone)
    return batches if len(inputs.items) > 1 else batches[:1]


def _measure_all(
    chosen: ChosenTower,
    config: fx.EncoderConfig,
    ways: Sequence[str],
    rows: Sequence[Measured],
    document: Document,
) -> dict[str, float]:
    """Times every way, and returns the seconds that each took before it could be timed."""
    seconds: dict[str, float] = {}
    with progress_bars() as bar:
        update = bar("measuring")
        for number, name in enumerate(ways):
            update(number, len(ways))
            try:
                seconds[name] = _measure_way(chosen, config, name, rows)
            except InputError:
                raise
            except _OF_A_WAY as error:  # of a compiler, say: the others are measured all the same
                reason = next(iter(str(error).splitlines()), "")
                document.notes([f"{WAYS[name].title} failed: {type(error).__name__}: {reason}"])
            gc.collect()
            torch.cuda.empty_cache()
        update(len(ways), len(ways))
    return seconds


def _measure_way(chosen: ChosenTower, config: fx.EncoderConfig, name: str, rows: Sequence[Measured]) -> float:
    eager = chosen.family.eager_tower(chosen.module)
    start = time.perf_counter()
    with contextlib.closing(WAYS[name].start(chosen, config)) as running:
        seconds = time.perf_counter() - start
        for row in rows:
            mm_kwargs = row.batch.mm_kwargs
            start = time.perf_counter()
            run = running.prepare(mm_kwargs)
            results = run()
            seconds += time.perf_counter() - start
            _check(results, eager(mm_kwargs))
            row.ms[name] = measure_ms(run, chosen.device, _REPEATS)
            if (padding := running.padding(mm_kwargs)) is not None:
                row.batch.row["padding_fraction"] = padding
    return seconds


def _check(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Raises RuntimeError for results that are wrong and not just rounded."""
    size = rms_error(expected, [torch.zeros_like(each) for each in expected])
    error = rms_error(results, expected) / size
    if not error <= _ERROR_LIMITS.get(expected[0].dtype, _ERROR_LIMIT):  # so written that NaN fails too
        raise RuntimeError(f"it is wrong: differs from eager by {error:.2g} of its root mean square")


def _say_rows(
    document: Document, rows: Sequence[Measured], titles: Mapping[str, str], *, is_compared: bool
) -> None:
    what = "; gain: how many times as fast ours is as the best other" if is_compared else ""
    document.say(f"Milliseconds, the least of {_REPEATS} runs{what}")
    names = {way: f"{way}_ms".replace("-", "_") for way in titles}
    table = []
    for each in rows:
        times = {name: each.ms.get(way) for way, name in names.items()}
        table.append({**each.batch.row, **times, **({"gain": each.gain} if is_compared else {})})
    headers = {"size": "size px", "padding_fraction": "padding"}
    headers |= {name: titles[way] for way, name in names.items()}
    formats = dict.fromkeys([*names.values(), "gain"], "{:.2f}".format)
    document.table("rows", table, headers, {**formats, "padding_fraction": "{:.0%}".format})
