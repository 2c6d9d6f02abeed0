"""Vision models behind `torch.compile`, by this backend and by torch's own modes.

    python benchmarks/bench.py backend --output out/backend.json
    python benchmarks/bench.py backend --embedding --output out/embedding.json

Models of timm and transformers at their default sizes, bf16, seeded random weights, batches of 1, 8 and 32
images of random pixels. Milliseconds, medians of calls in turn, wall time to the end of the device's work
("p50"), and that which a call keeps the CPU ("host"):

* "eager": without `torch.compile`; "reduce-overhead" and "max-autotune": those modes; "encoder_cg": this
  backend. Each is compiled for each batch size, with `dynamic=False`.
* "error" of a way: relative root mean square against the model in float32. "floor" of a batch: milliseconds
  that its products, convolutions and attention take at the rate of a large matrix product, timed beside it.

`--embedding`: towers that people embed with, at batches of 1 to 256, as timm's own benchmark has them.

A process for each model, which sees one GPU. They compile side by side, `--jobs` on each GPU, and are timed
one after another, on all GPUs at once, when none compiles any more. What a process has not compiled after
`--compile-seconds` is left out, max-autotune first. `--tiny` takes three small models of transformers
without torch's modes, on a CPU too.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import multiprocessing
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import torch
import transformers
from processes import run_process, visible_gpus
from storage import Record, Row, failing
from tables import embedding
from timing import in_turns
from torch import Tensor, nn
from worker import count_flops, gemm_flops_per_second, relative_error

TIMM = (
    "vit_base_patch16_224 vit_small_patch16_224 vit_large_patch14_clip_224 vit_so400m_patch14_siglip_384 "
    "vit_base_patch14_dinov2 vit_base_patch16_dinov3 deit3_base_patch16_224 eva02_base_patch14_448 "
    "beitv2_base_patch16_224 cait_s24_224 xcit_small_12_p16_224 swin_base_patch4_window7_224 "
    "swinv2_base_window8_256 mixer_b16_224 pvt_v2_b2 convnext_base convnextv2_base resnet50 resnet101 "
    "efficientnet_b3 regnety_040 mobilenetv3_large_100 poolformerv2_s24 caformer_s18 davit_base "
    "hiera_base_224 levit_256 mvitv2_base fastvit_sa12"
).split()
TRANSFORMERS = (
    "ViT Dinov2 Dinov2WithRegisters SiglipVision CLIPVision ConvNext ConvNextV2 Swin Swinv2 "
    "Beit DINOv3ViT ResNet"
).split()
EMBEDDING = (
    "timm/vit_so400m_patch14_siglip_384 timm/vit_large_patch14_clip_336 timm/vit_large_patch14_dinov2 "
    "timm/vit_large_patch16_dinov3 transformers/InternVLVision"
).split()
MODES = ("reduce-overhead", "max-autotune")
TINY: dict[str, dict[str, Any]] = {
    "ViT": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48},
    "ConvNext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
}
_SAMPLES, _WARMUPS = 30, 4
_SECONDS_TO_NEXT = 5  # alarm, where the first was caught by what tries one kernel after another
_RECOMPILATIONS = 64  # each way compiles the same code, torch's modes at each size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [*(f"timm/{name}" for name in TIMM), *(f"transformers/{name}" for name in TRANSFORMERS)]
    parser.add_argument("--models", nargs="+", default=names, metavar="NAME")
    parser.add_argument("--embedding", action="store_true", help="what the table of embedding towers needs")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--jobs", type=int, default=6, help="models that compile at once on a GPU")
    parser.add_argument("--compile-seconds", type=float, default=1200)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for a model")


def make(name: str, tiny: bool) -> tuple[nn.Module, int]:
    """A model with seeded weights, in float32, and the side of its images in pixels."""
    torch.manual_seed(0)
    library, _, name = name.partition("/")
    if library == "timm":
        import timm

        model = timm.create_model(name, num_classes=0)
        return model.eval().requires_grad_(False), model.pretrained_cfg["input_size"][-1]
    config = getattr(transformers, f"{name}Config")(**(TINY[name] if tiny else {}))
    model = getattr(transformers, f"{name}Model")(config)
    for weight in model.parameters():  # where transformers begins with zeros, nothing would be compared
        if weight.dim() and not weight.any():
            nn.init.normal_(weight, std=0.02)
    side = getattr(config, "image_size", 224)
    return model.eval().requires_grad_(False), side if isinstance(side, int) else side[-1]


def output_of(model: Callable[..., Any], pixels: Tensor) -> Tensor:
    """The rows of a call: the first tensor of what it returns."""
    made = model(pixels)
    return made if isinstance(made, Tensor) else made[0]


def rows_of(name: str, options: argparse.Namespace, ready: Any, go: Any, turn: Any) -> Iterator[Row]:
    """Compiles each way of a model, waits for the others of the GPU, then times them in turn."""
    end = time.monotonic() + options.compile_seconds
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, options.compile_seconds, _SECONDS_TO_NEXT)
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = _RECOMPILATIONS
    device = options.device
    calls: dict[tuple[str, int], Callable[[], Tensor]] = {}
    rows: dict[tuple[str, int], Row] = {}
    with torch.no_grad():  # parameters made in inference mode have no versions
        model, side = make(name, options.tiny)
        model.to(device)
        pixels = {n: torch.randn(n, 3, side, side, device=device) for n in options.batches}
        expected = {n: output_of(model, each).float() for n, each in pixels.items()}
        dtype = torch.float32 if options.tiny else torch.bfloat16
        model = make(name, options.tiny)[0].to(device, dtype)  # a new one: some keep tensors of their calls
        pixels = {n: each.to(dtype) for n, each in pixels.items()}
        ways = ["eager", "encoder_cg", *(() if options.tiny else options.modes)]
        for way, n in itertools.product(ways, options.batches):
            begin = time.monotonic()
            row: Row = {"model": name, "batch": n, "way": way}
            with failing(row):  # which the other ways need not share
                compiled = model if way == "eager" else compiled_by(way, copy.deepcopy(model))
                call = functools.partial(output_of, compiled, pixels[n])
                for _ in range(_WARMUPS):
                    made = call()
                error = relative_error(made.float(), expected[n])
                rows[way, n] = {**row, "warm-up s": time.monotonic() - begin, "error": error}
                calls[way, n] = call
            if time.monotonic() > end:
                break
            if "failure" in row:
                yield row
        signal.setitimer(signal.ITIMER_REAL, 0)
    ready.set()
    go.wait(options.timeout)
    with turn, torch.no_grad():  # as before: graphs are compiled anew in another mode
        yield from timed_rows(calls, rows, options, gemm_flops_per_second(torch.device(device), dtype))


def timed_rows(
    calls: Mapping[tuple[str, int], Callable[[], Tensor]],
    rows: Mapping[tuple[str, int], Row],
    options: argparse.Namespace,
    rate: float,
) -> Iterator[Row]:
    """Times what was compiled, batch by batch, and compares with `rate`, in operations a second."""
    for n in options.batches:
        of_batch = {way: call for (way, batch), call in calls.items() if batch == n}
        if "eager" in of_batch:
            rows["eager", n]["floor"] = count_flops(of_batch["eager"]) / rate * 1e3
        for way, times in in_turns(of_batch, 2 if options.tiny else _SAMPLES, 3).items():
            walls, hosts = zip(*times, strict=True)
            yield {**rows[way, n], "p50": statistics.median(walls), "host": statistics.median(hosts)}


def _stop(_: int, frame: FrameType | None) -> None:
    """Raises TimeoutError, but in a capture of `cudagraph_trees`, which could not go on after it."""
    while frame is not None and not frame.f_code.co_filename.endswith("cudagraph_trees.py"):
        frame = frame.f_back
    if frame is None:
        raise TimeoutError("compiling took too long")


def compiled_by(way: str, model: nn.Module) -> Any:
    """A model by this backend or by one of torch's modes."""
    chosen: Any = {"backend": way} if way == "encoder_cg" else {"mode": way}
    return torch.compile(model, dynamic=False, **chosen)


def run(arguments: argparse.Namespace, record: Record) -> None:
    if arguments.tiny:
        arguments.models, arguments.batches = [f"transformers/{name}" for name in TINY], [1, 2]
    elif arguments.embedding:
        arguments.models, arguments.batches = EMBEDDING, [1, 8, 64, 256]
    gpus: list[str | None] = [*visible_gpus()] or [None]
    context = multiprocessing.get_context("spawn")

    compiled = threading.Barrier(len(gpus))
    at_once = len(gpus) * arguments.jobs
    rounds = [arguments.models[begin : begin + at_once] for begin in range(0, len(arguments.models), at_once)]

    def measure(number: int) -> None:
        for models in rounds:
            now = models[number :: len(gpus)]
            readies, go, turn = [context.Event() for _ in now], context.Event(), context.Lock()

            def one(name: str, ready: Any, go: Any = go, turn: Any = turn) -> None:
                options = (name, arguments, ready, go, turn)
                failure = run_process(rows_of, options, arguments.timeout, record, "spawn", gpus[number])
                if failure is not None:
                    record({"model": name, "failure": failure})
                ready.set()

            with ThreadPoolExecutor(arguments.jobs) as each:
                ended = each.map(one, now, readies)
                for ready in readies:
                    ready.wait()
                compiled.wait()
                go.set()
                list(ended)

    with ThreadPoolExecutor(len(gpus)) as pool:
        list(pool.map(measure, range(len(gpus))))
    if arguments.embedding:
        print(embedding(record.result))
