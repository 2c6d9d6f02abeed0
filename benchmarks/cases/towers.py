"""Every tower at its published size: error and time against eager, seconds to compile and capture, memory.

    python benchmarks/bench.py towers --output out/towers.json

Full depth, bf16, seeded random weights, mode `auto`, configs/. Sizes are patches of packed towers, tiles of
towers of equal tiles, and crops of those that also see the image as a whole. Errors are against the tower in
float32, image by image, as multiples of eager's own: of the root mean square, 1.1 at most, and of the largest
difference; free memory and the graphs' pool are full of NaN beforehand. Times are medians in milliseconds to
the end of the device's work; "eager" is transformers' forward (sdpa), or this library's model where it has
none. Parts of several runs are merged by `bench.py tables`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import time
from collections.abc import Iterator
from typing import Any

import torch
from poison import poison
from storage import ROOT, Record, Row, failing
from timing import timed, wall_ms

import fxsplit_encoder as fx
from fxsplit_encoder.models.eager import as_tensors, max_error, rms_error, share_weights
from fxsplit_encoder.models.random import demo_tower, random_inputs
from fxsplit_encoder.models.registry import architecture

MODELS = {
    "qwen2-vl-7b": "qwen2_vl_7b",
    "qwen2.5-vl-7b": "qwen2_5_vl_7b",
    "qwen3-vl-8b": "qwen3_vl_8b",
    "qwen3.5-9b": "qwen3_5_9b",
    "glm-4.1v-9b": "glm_4_1v_9b",
    "kimi-vl-a3b": "kimi_vl",
    "kimi-k2.5": "kimi_k25",
    "internvl3-8b": "internvl3_8b",
    "internvl3-38b": "internvl3_38b",
    "llama4": "llama4",
    "siglip-so400m-384": None,
    "clip-l-336": None,
    "dinov2-l-518": None,
    "deepseek-ocr": "deepseek_ocr",
    "step3-vl": None,
    "step3p7": None,
}
"""Towers, and their configuration in configs/; None: what is inferred."""

ALLOWED_ERROR = 1.1
_SAMPLES, _WARMUPS = 15, 4
_TILED = ("deepseek-ocr", "step3-vl", "step3p7")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")


def sizes(wrapped: Any, name: str, tiny: bool) -> dict[str, list[int]]:
    """The sizes of the images of every batch, by its name."""
    if isinstance(wrapped, fx.PackedTower):
        single, batch, smallest = (256, 1024, 7056), [256, 576, 1024, 144, 784, 2304, 400, 1600], [16, 64]
    elif name in _TILED:
        single, batch, smallest = (0, 4, 9), [0, 2, 4, 0, 6, 9, 0, 2], [0, 1]
    else:
        single, batch, smallest = (1, 4, 16 if name == "llama4" else 12), [1, 2, 5, 1, 7, 3, 1, 4], [1, 2]
    if tiny:
        return {"small": smallest[:1], "batch of 8": smallest}
    return {
        **{what: [size] for what, size in zip(("small", "medium", "large"), single, strict=True)},
        "batch of 8": batch,
    }


def chosen_config(name: str, tiny: bool) -> fx.EncoderConfig:
    """The configuration in configs/, or the inferred one."""
    file = MODELS[name]
    if tiny:
        return fx.EncoderConfig(mode="none")
    return fx.EncoderConfig() if file is None else fx.EncoderConfig.from_yaml(ROOT / f"configs/{file}.yaml")


class Bench:
    """One tower: eager in bf16 and in float32, and captured."""

    def __init__(self, name: str, tiny: bool) -> None:
        self.family = architecture(name).family
        self.name, self.tiny = name, tiny
        # In bf16 a CPU takes minutes.
        device, dtype, blocks = ("cpu", torch.float32, 1) if tiny else ("cuda", torch.bfloat16, None)
        self.tower = demo_tower(blocks, device, dtype, model=name)
        self.wrapped = self.family.wrap(share_weights(self.tower))
        self.eager = self.family.eager_tower(self.tower)
        self.batches = {
            what: (its_sizes, random_inputs(self.wrapped, its_sizes, seed))
            for seed, (what, its_sizes) in enumerate(sizes(self.wrapped, name, tiny).items())
        }

    def references(self) -> dict[str, list[torch.Tensor]]:
        """Every batch in float32, image by image; the float32 copy is released afterwards."""
        wider = torch.float64 if self.tiny else torch.float32
        exact = self.family.eager_tower(copy.deepcopy(self.tower).to(wider))
        select = exact.adapter.select_encoder_cudagraph_items
        return {
            what: [exact(as_tensors(select(inputs, [index])))[0] for index in range(len(its_sizes))]
            for what, (its_sizes, inputs) in self.batches.items()
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        """What a start takes, then a row for each batch."""
        references = self.references()
        release()
        manager = fx.EncoderCudaGraphManager(
            self.wrapped, chosen_config(self.name, self.tiny), log_interval=0
        )
        calls = (manager.compile, manager.capture)
        seconds = {f"{what.__name__} s": timed(what)[0] / 1e3 for what in calls}
        yield {"workload": "start", **seconds, "bytes": manager.num_bytes}
        for what in self.batches:
            yield {"workload": what, **self._measure(manager, what, references.pop(what))}
        manager.clear()

    def _measure(self, manager: Any, what: str, reference: list[torch.Tensor]) -> dict[str, Any]:
        its_sizes, inputs = self.batches[what]
        if torch.cuda.is_available():
            poison(manager.pool)
        ours, eager = manager.execute(inputs), self.eager(inputs)
        errors = {
            "rms error": rms_error(ours, reference) / rms_error(eager, reference),
            "max error": max_error(ours, reference) / max_error(eager, reference),
        }
        del ours, eager
        samples, warmups = (1, 0) if self.tiny else (_SAMPLES, _WARMUPS)
        own = self.family.eager
        forward = self.eager if own is None else functools.partial(own, self.tower)
        eager_ms = wall_ms(lambda: forward(inputs), samples, warmups)
        ours_ms = wall_ms(lambda: manager.execute(inputs), samples, warmups)
        row = {"sizes": its_sizes, "eager": eager_ms, "ours": ours_ms, "samples": samples, **errors}
        if not errors["rms error"] <= ALLOWED_ERROR:  # so written that NaN fails too
            row["failure"] = f"the error is more than {ALLOWED_ERROR} times eager's"
        return row


def release() -> None:
    """Gives back what no tensor owns any more."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@torch.no_grad()
def run(arguments: argparse.Namespace, record: Record) -> None:
    tiny = arguments.tiny
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    record.settings.update(dtype="float32" if tiny else "bfloat16", blocks=1 if tiny else None)
    for name in arguments.models:
        begin = time.perf_counter()
        whole: Row = {"tower": name, "workload": "all"}
        with failing(whole):
            for row in Bench(name, tiny).rows():
                record({"tower": name, **row})
        if "failure" in whole:
            record(whole)
        release()
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
