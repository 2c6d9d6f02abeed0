"""Every tower at its published size: error and time against eager, seconds to compile and capture, memory.

    python benchmarks/bench.py towers --output out/towers.json

Full depth, bf16, seeded random weights, mode `auto`, configs/. Sizes are patches of packed towers, tiles of
towers of equal tiles, and crops of those that also see the image as a whole. Errors are against the tower in
float32, image by image, as multiples of eager's own: of the root mean square, 1.1 at most, and of the largest
difference. Times are medians in milliseconds to the end of the device's work; "eager" is transformers'
forward (sdpa), or this library's model where it has none. Parts of several runs are merged by
`bench.py tables`. `--tiny` takes one block of each tower on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch
from storage import ROOT, Record, Row
from timing import release, timed, wall_ms
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.models.eager import EagerTower, as_tensors, max_error, rms_error, share_weights
from fxsplit_encoder.models.random import demo_tower, draw_weights, random_inputs
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
_NARROW = dict(hidden_size=64, num_attention_heads=4, intermediate_size=256, output_hidden_size=64)


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


def measure(name: str, tiny: bool) -> Iterator[Row]:
    """What a start takes, then a row for each batch."""
    family = architecture(name).family
    tower = narrow_tower(name) if tiny else demo_tower(None, "cuda", torch.bfloat16, model=name)
    wrapped = family.wrap(share_weights(tower))
    eager = family.eager_tower(tower)
    forward = eager if family.eager is None else functools.partial(family.eager, tower)
    batches = {
        what: (its_sizes, random_inputs(wrapped, its_sizes, seed))
        for seed, (what, its_sizes) in enumerate(sizes(wrapped, name, tiny).items())
    }
    exact = family.eager_tower(copy.deepcopy(tower).to(torch.float64 if tiny else torch.float32))
    references = {what: item_by_item(exact, inputs, len(each)) for what, (each, inputs) in batches.items()}
    del exact
    release()
    manager = fx.EncoderCudaGraphManager(wrapped, chosen_config(name, tiny), log_interval=0)
    seconds = {f"{what.__name__} s": timed(what)[0] / 1e3 for what in (manager.compile, manager.capture)}
    yield {"workload": "start", **seconds, "bytes": manager.num_bytes}
    samples, warmups = (1, 0) if tiny else (_SAMPLES, _WARMUPS)
    for what, (its_sizes, inputs) in batches.items():
        errors = errors_of(manager.execute(inputs), eager(inputs), references.pop(what))
        times = {
            "eager": wall_ms(functools.partial(forward, inputs), samples, warmups),
            "ours": wall_ms(functools.partial(manager.execute, inputs), samples, warmups),
        }
        row = {"workload": what, "sizes": its_sizes, **times, "samples": samples, **errors}
        if not errors["rms error"] <= ALLOWED_ERROR:  # so written that NaN fails too
            row["failure"] = f"the error is more than {ALLOWED_ERROR} times eager's"
        yield row
    manager.clear()


def narrow_tower(name: str) -> Any:
    """One block in float32, which a CPU runs faster than bf16; a narrow one of Step3, whose has 460 million
    parameters.
    """
    known = architecture(name)
    settings = known.settings(1)
    vision = settings["vision_config"] | (_NARROW if name == "step3-vl" else {})
    tower = known.family.empty_tower({**settings, "vision_config": vision}, torch.device("cpu"))
    draw_weights(tower, 0)
    return tower


def item_by_item(exact: EagerTower, inputs: Any, count: int) -> list[Tensor]:
    """What a wider tower makes of every image alone."""
    select = exact.adapter.select_encoder_cudagraph_items
    return [exact(as_tensors(select(inputs, [index])))[0] for index in range(count)]


def errors_of(ours: list[Tensor], eager: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
    """As multiples of eager's."""
    return {
        "rms error": rms_error(ours, exact) / rms_error(eager, exact),
        "max error": max_error(ours, exact) / max_error(eager, exact),
    }


@torch.no_grad()
def run(arguments: argparse.Namespace, record: Record) -> None:
    tiny = arguments.tiny
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    record.settings.update(dtype="float32" if tiny else "bfloat16", blocks=1 if tiny else None)
    for name in arguments.models:
        begin = time.perf_counter()
        record.all(measure(name, tiny), tower=name)
        torch._dynamo.reset()
        release()
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
