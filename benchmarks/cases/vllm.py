"""Inside vLLM: its classes run eagerly, through its own manager of encoder CUDA graphs, and through ours.

    python benchmarks/bench.py vllm --output out/vllm.json
    python benchmarks/bench.py vllm --towers qwen3-vl-8b --variants eager vllm ours

Published sizes, seeded random weights, bf16, at most eight images a batch and 8192 output tokens. Timed is
what vLLM's runners call: `embed_multimodal` for "eager", `execute` for "vllm", "ours" (the plugin without
compiling) and "ours-compiled" (`compile: true`), in turns of a call each, in one process for a tower. "error"
is the root mean square of the difference from eager's output, relative to that. A tower that fails or takes
too long leaves its rows and the reason. `--tiny` runs two narrow blocks of Qwen3-VL's class on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from models import TINY, kind_of, make_model, rows_of
from processes import run_process
from storage import Record, Row, failing
from timing import in_turns, summarize, synchronize
from torch import Tensor
from vllm_classes import (
    CLASSES,
    MAX_ITEMS,
    MAX_TOKENS,
    VllmClass,
    build,
    captured_manager,
    engine_config,
    installed_version,
    prepare_environment,
    start_vllm,
    vllm_inputs,
)
from vllm_classes import TINY as TINY_CLASS
from worker import checked_error
from workloads import QUICK_WORKLOADS, README, WORKLOADS, Request

VARIANTS = ("eager", "vllm", "ours", "ours-compiled")
_TINY = "qwen3-vl-8b"
_WARMUPS = 3
_MOST_REPORTS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    names = ", ".join(CLASSES)
    add("--towers", nargs="+", choices=CLASSES, default=list(CLASSES), metavar="TOWER", help=names)
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help=", ".join(VARIANTS))
    add("--workloads", nargs="+", metavar="NAME", help="of those that a tower takes")
    add("--samples", type=int, default=15, help="timed calls of each variant of a row")
    add("--timeout", type=float, default=240, help="the most seconds of a tower")


def run(options: argparse.Namespace, record: Record) -> None:
    dtype = "float32" if options.tiny else "bfloat16"
    record.settings.update(dtype=dtype, samples=options.samples, max_items=MAX_ITEMS, max_tokens=MAX_TOKENS)
    record.result["vllm"] = installed_version()
    prepare_environment()
    for tower in [_TINY] if options.tiny else options.towers:
        start = time.monotonic()

        def keep(row: Row, tower: str = tower) -> None:
            record({"tower": tower, **row})

        failure = run_process(contest, (tower, options), options.timeout, keep, "spawn")
        if failure is not None:
            keep({"variant": "all", "workload": "all", "failure": failure})
        print(f"{tower}: {failure or 'done'} ({time.monotonic() - start:.0f} s)", flush=True)


# --- in the process of a tower


def contest(tower: str, options: argparse.Namespace) -> Iterator[Row]:
    """What every variant takes to start, then a row for each variant of each workload."""
    device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)
    if options.tiny:
        _prepare_cpu()
    start_vllm(device)
    with torch.inference_mode():
        yield from _Contest(tower, options, device).rows()


class _Contest:
    """One class: its batches, and the variants that run them."""

    def __init__(self, tower: str, options: argparse.Namespace, device: torch.device) -> None:
        self.tiny, self.device, self.samples = options.tiny, device, options.samples
        self.variants: Sequence[str] = options.variants
        self.dtype = torch.float32 if self.tiny else torch.bfloat16
        self.cls = _tiny_class() if self.tiny else CLASSES[tower]
        self.config = engine_config(self.cls, self.dtype)
        sizes = make_model(TINY if self.tiny else tower, 1, device, self.dtype)
        batches = {name: sizes.batch(request) for name, request in _requests(tower, options).items()}
        self.batches = {
            name: (vllm_inputs(sizes.kind, batch.mm_kwargs), batch.patches) for name, batch in batches.items()
        }

    def rows(self) -> Iterator[Row]:
        """All of them. The models that attend through our op, and through vLLM's, stay side by side."""
        model = build(self.cls, self.config, self.device)
        embed = model.embed_multimodal
        runs: dict[str, Any] = {"eager": lambda values: embed(**values)}
        expected = {name: rows_of(embed(**values)).cpu() for name, (values, _) in self.batches.items()}
        for variant in self.variants:
            if variant == "eager" or (variant == "vllm" and self.tiny):  # it has nothing but CUDA graphs
                continue
            if variant == "ours-compiled":
                model = self._split_model()
            row: Row = {"variant": variant, "workload": "start"}
            begin = time.perf_counter()
            with failing(row):
                manager = self._manager(variant, model)
                synchronize()
                reports = [] if variant == "vllm" else manager.manager.reports[:_MOST_REPORTS]
                row |= {"seconds": time.perf_counter() - begin, "reports": reports}
                runs[variant] = manager.execute
            yield row
        for name, (values, patches) in self.batches.items():
            for row in self._measure(runs, values, expected[name]):
                yield {"workload": name, "patches": patches, **row}
            gc.collect()

    def _split_model(self) -> Any:
        """The same weights behind this library's attention."""
        from fxsplit_encoder.integrations.vllm.plugin import install_layers

        problem = install_layers()
        if problem is not None:
            raise RuntimeError(f"vLLM's layers cannot be replaced: {problem}")
        self.config = engine_config(self.cls, self.dtype)  # it holds the layers of one model
        return build(self.cls, self.config, self.device)

    def _manager(self, variant: str, model: Any) -> Any:
        """A manager as vLLM's runner makes it, captured.

        Raises:
            RuntimeError: ours left the work to vLLM's.
        """
        from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

        make: Any = EncoderCudaGraphManager
        if variant != "vllm":
            make = _ours(EncoderCudaGraphManager, variant == "ours-compiled", self.tiny)
        manager = captured_manager(make, self.config, self.device, self.dtype, model)
        if variant != "vllm" and manager.manager is None:
            raise RuntimeError("vLLM's own manager serves; the plugin's warning says why")
        return manager

    def _measure(
        self, runs: Mapping[str, Any], values: Mapping[str, Tensor], expected: Tensor
    ) -> Iterator[Row]:
        """Every variant on one batch: compared with eager, then timed in turns."""
        rows: dict[str, Row] = {}
        calls: dict[str, Callable[[], Any]] = {}
        for variant, run_it in runs.items():
            row = rows[variant] = {"variant": variant}
            with failing(row):
                row["error"] = checked_error(rows_of(run_it(dict(values))), expected)
                calls[variant] = lambda run_it=run_it: run_it(dict(values))
        for variant, times in in_turns(calls, self.samples, _WARMUPS).items():
            wall, host = zip(*times, strict=True)
            rows[variant] |= {**summarize(wall), "host": statistics.median(host)}
        yield from rows.values()


def _ours(vllm_class: type, compiles: bool, tiny: bool) -> Any:
    from fxsplit_encoder import EncoderConfig
    from fxsplit_encoder.integrations.vllm.adapter import make_adapter
    from fxsplit_encoder.integrations.vllm.settings import DEFAULTS

    if not compiles:
        return make_adapter(vllm_class, DEFAULTS)
    pieces = {"piece_compiler": "eager"} if tiny else {}
    return make_adapter(vllm_class, EncoderConfig(compile=True, **pieces))


def _tiny_class() -> VllmClass:
    """With patches of the size that the benchmarks' tiny tower has, and room for as many tokens as others."""
    config = copy.deepcopy(dict(TINY_CLASS.config))
    config["vision_config"] |= {"patch_size": 16}
    config["text_config"] |= {"max_position_embeddings": MAX_TOKENS}
    return dataclasses.replace(TINY_CLASS, config=config)


def _requests(tower: str, options: argparse.Namespace) -> dict[str, Request]:
    kind = kind_of(tower)
    known = (QUICK_WORKLOADS if options.tiny else WORKLOADS)[kind]
    names = README if kind == "packed" and not options.tiny else known
    requests = {name: known[name][0] for name in names if not options.workloads or name in options.workloads}
    return {name: request for name, request in requests.items() if not request.clips}


def _prepare_cpu() -> None:
    """vLLM's attention of a CPU takes no padding rows; the one of its tests does."""
    from vllm_cpu import use_padded_attention

    use_padded_attention()
    torch.cuda.is_current_stream_capturing = lambda: False
