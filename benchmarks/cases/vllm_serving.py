"""vLLM's engine from prompts with images to tokens: its eager encoder, its manager of captures, and ours.

    python benchmarks/bench.py vllm_serving --output out/vllm_serving.json

Qwen3-VL-8B's encoder in front of two layers of its language model, random weights, bf16, caches of prompts
and images off; with `--language-model eager` a prefill of one image keeps the host for longer than the
encoder the GPU. For each variant ("eager", "vllm" its manager, "ours" the plugin, "ours-compiled" with
`compile: true`) requests with no, one and four images of 448 to 896 pixels a side arrive at a fixed rate,
then with one image all at once. Milliseconds to the first token (median and 99th percentile) include vLLM's
preprocessing; "encoder host" and "encoder device" are medians of the worker's steps that encode. "same" is
the share of requests whose tokens are those of the first variant.

The same requests go to each engine in turn, all on the cores of one memory node. Processes differ by when
they were started: `--engines 2` starts a second one of each in the opposite order, whose answers count too.
One that does not start leaves its error and prints its log. `--tiny` runs narrow models eagerly on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from storage import Record, Row, one_line
from timing import percentile
from vllm_classes import CLASSES, MAX_ITEMS, MAX_TOKENS, TINY, installed_version, prepare_environment


class Engine(NamedTuple):
    """One of a variant's."""

    variant: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.number}"


VARIANTS = ("eager", "vllm", "ours", "ours-compiled")
RATES = {0: 20.0, 1: 10.0, 4: 5.0}
"""Requests a second, by the number of their images."""
_SIDES = (448, 672, 896, 512)
_TOKENS = 8
_BURST = 32
_DECODES = [1, 2, 4, 8, 16, 32]
AT_ONCE = "1 image, at once"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
_PADS = ("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_WORDS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help=", ".join(VARIANTS))
    add("--seconds", type=float, default=2.0, help="how long requests of a kind arrive in a round")
    add("--rounds", type=int, default=3, help="how often each variant takes its turn")
    add("--engines", type=int, default=1, help="processes of each variant, every other time in reverse")
    add("--language-model", choices=("compiled", "eager"), default="compiled", help="how it runs")
    add("--timeout", type=float, default=480, help="the most seconds until every engine has started")


def run(options: argparse.Namespace, record: Record) -> None:
    dtype = "float32" if options.tiny else "bfloat16"
    record.settings.update(dtype=dtype, seconds=options.seconds, rounds=options.rounds, rates=RATES)
    record.settings.update(tokens=_TOKENS, engines=options.engines)
    record.settings["language model"] = "eager" if options.tiny else options.language_model
    record.result["vllm"] = installed_version()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), options.tiny)
        _run_all(options, folder, record)


def _run_all(options: argparse.Namespace, folder: str, record: Record) -> None:
    """Starts every engine, then asks them in turn."""
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    pipes: dict[Engine, Any] = {}
    deadline = time.monotonic() + options.timeout
    for engine in order_of_start(options.variants, options.engines):
        pipes[engine], theirs = context.Pipe()
        process = context.Process(target=_work, args=(engine, folder, options, theirs))
        processes.append(process)
        process.start()
        theirs.close()
        row = _next(pipes[engine], deadline)
        record({"variant": engine.variant, **row})
        if "failure" in row:
            log = Path(folder) / f"{engine.name}.log"
            print(log.read_text(encoding="utf-8", errors="replace"), flush=True)
            del pipes[engine]
    for requests in (*(f"{images} images" for images in RATES), AT_ONCE):
        for row in _measured(requests, pipes, options):
            record(row)
    for pipe in pipes.values():
        pipe.close()  # an engine that nobody can ask any more ends itself and its own processes
    for process in processes:
        process.join(30)
        process.kill()


def order_of_start(variants: Sequence[str], engines: int) -> list[Engine]:
    """So many engines of each variant, there and back again: none of them is always the first."""
    rounds = ([*variants] if number % 2 == 0 else [*reversed(variants)] for number in range(engines))
    return [Engine(variant, number) for number, each in enumerate(rounds) for variant in each]


def _measured(requests: str, pipes: dict[Engine, Any], options: argparse.Namespace) -> list[Row]:
    """A row for each variant, of every round of its engines; one that fails is asked for nothing more."""
    given: dict[str, list[Row]] = {engine.variant: [] for engine in pipes}
    failures = []
    for turn in range(options.rounds):
        for engine in _rotated(list(pipes), turn):
            pipes[engine].send((requests, turn))
            answer = _next(pipes[engine], time.monotonic() + 10 * options.seconds + 60)
            if "failure" in answer:
                failures.append({"variant": engine.variant, **answer, "requests": requests})
                del pipes[engine]
                given.pop(engine.variant, None)  # not to be told from one that was asked less
            elif engine.variant in given:
                given[engine.variant].append({**answer, "turn": turn, "engine": engine.number})
    first = next(iter(given), None)
    expected = {each["turn"]: each["answers"] for each in given[first]} if first is not None else {}
    rows = [_row(variant, requests, rounds, expected) for variant, rounds in given.items()]
    return rows + failures


def _rotated(engines: list[Engine], turn: int) -> list[Engine]:
    """Another one is first in every round: what one leaves behind is not always the same one's loss."""
    start = turn % len(engines) if engines else 0
    return engines[start:] + engines[:start]


def _row(variant: str, requests: str, rounds: Sequence[Row], expected: Mapping[int, list[Any]]) -> Row:
    """What a variant did in all rounds together, beside the answers of the first variant in each."""
    answers, first = _joined(rounds, "answers"), _joined(rounds, "first")
    row = {"variant": variant, "requests": requests, "count": len(first)}
    images = requests.removesuffix(" images")
    row |= {"rate": RATES[int(images)]} if images.isdigit() else {}
    row |= {"p50": percentile(first, 0.5), "p99": percentile(first, 0.99)}
    numbers = {each["engine"] for each in rounds}
    if len(numbers) > 1:
        own = ([each for each in rounds if each["engine"] == number] for number in sorted(numbers))
        row["p50 by engine"] = [percentile(_joined(each, "first"), 0.5) for each in own]
    if requests == AT_ONCE:
        row["requests per second"] = len(first) / sum(each["seconds"] for each in rounds)
    for name in ("encoder host", "encoder device"):
        if times := _joined(rounds, name):
            row[name] = percentile(times, 0.5)
    others = [answer for each in rounds for answer in expected[each["turn"]]]
    same = map(list.__eq__, answers, others)
    return {**row, "same": sum(same) / len(answers)}


def _joined(rounds: Sequence[Row], name: str) -> list[Any]:
    return [value for each in rounds for value in each.get(name, ())]


def _next(pipe: Any, deadline: float) -> Row:
    try:
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            row: Row = pipe.recv()
            return row
        return {"requests": "start", "failure": "it took too long"}
    except EOFError:
        return {"requests": "start", "failure": "its process ended"}


# --- the model


def save_model(directory: Path, tiny: bool) -> None:
    """config.json with a tokenizer of words and image processors; weights are vLLM's dummies."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*_SPECIAL, *_PADS, *(f"word{number}" for number in range(_WORDS))]
    vocabulary = {token: number for number, token in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_SPECIAL[0], additional_special_tokens=[*_SPECIAL[1:], *_PADS]
    ).save_pretrained(directory)
    config = dict((TINY if tiny else CLASSES["qwen3-vl-8b"]).config)
    patch = config["vision_config"]["patch_size"]
    config["text_config"] = {
        **config["text_config"],
        **dict(num_hidden_layers=2, vocab_size=len(vocabulary), bos_token_id=0, eos_token_id=0),
    }
    if tiny:
        config["text_config"] |= dict(num_attention_heads=4, num_key_value_heads=4, head_dim=32)
        config["text_config"]["rope_scaling"] = dict(
            rope_type="default", mrope_interleaved=True, mrope_section=[6, 5, 5]
        )
    for name in ("vision_start", "vision_end"):
        config[f"{name}_token_id"] = vocabulary[f"<|{name}|>"]
    config |= {f"{name}_token_id": vocabulary[f"<|{name}_pad|>"] for name in ("image", "video")}
    processor = dict(
        processor_class="Qwen3VLProcessor",
        size={"shortest_edge": (16 * patch) ** 2, "longest_edge": (64 * patch) ** 2},
        **dict(patch_size=patch, temporal_patch_size=2, merge_size=2),
        **dict(image_mean=[0.5] * 3, image_std=[0.5] * 3),
    )
    files = {
        "config": config,
        "preprocessor_config": {**processor, "image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config": {**processor, "video_processor_type": "Qwen3VLVideoProcessor"},
    }
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")


def prompts(images: int, count: int, turn: int, tiny: bool) -> list[dict[str, Any]]:
    """Requests of so many images each, no two of them alike."""
    import numpy as np

    draw = np.random.default_rng((images, turn))
    made = []
    for _ in range(count):
        words = [f"word{number}" for number in draw.integers(0, _WORDS, 64)]
        pictures = []
        for side in _SIDES[:images]:
            side = 64 if tiny else side
            pictures.append(draw.integers(0, 255, (side, side, 3), dtype=np.uint8))
        words += ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"] * images
        data = {"multi_modal_data": {"image": pictures}} if images else {}
        made.append({"prompt": " ".join(words), **data})
    return made


# --- in the process of a variant


def _work(engine: Engine, folder: str, options: argparse.Namespace, pipe: Connection) -> None:
    _write_to(Path(folder) / f"{engine.name}.log")
    use_one_node()
    try:
        asyncio.run(_serve(engine, folder, options, pipe))
    except Exception as error:
        traceback.print_exc()
        pipe.send({"requests": "start", "failure": one_line(error)})


def _write_to(log: Path) -> None:
    """Has this process and those that it starts write to a file: vLLM's engine fails in one of them, and says
    only there of what.
    """
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)


def use_one_node(nodes: Path = Path("/sys/devices/system/node")) -> None:
    """Keeps this process, and what it starts, on the memory node that has most of the cores it may use."""
    allowed = os.sched_getaffinity(0)
    cores = [_cores(path.read_text("utf-8")) & allowed for path in sorted(nodes.glob("node*/cpulist"))]
    if most := max(cores, key=len, default=None):
        os.sched_setaffinity(0, most)


def _cores(ranges: str) -> set[int]:
    """Of a list as Linux writes it: "0-3,8"."""
    ends = [each.split("-") for each in ranges.strip().split(",") if each]
    return {core for each in ends for core in range(int(each[0]), int(each[-1]) + 1)}


def plugin_problem(log: str) -> str | None:
    """Why the encoder is not served by the plugin's captures, by what an engine wrote; None: it is."""
    left = re.search(r"vLLM's own manager captures the encoder.*|fxsplit_encoder leaves vLLM as it is.*", log)
    if left is not None:
        return left[0].strip()
    return None if "encoder CUDA graphs by fxsplit_encoder" in log else "the plugin made no manager"


def _environment(which: Engine, folder: str) -> None:
    prepare_environment()
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ["VLLM_PLUGINS"] = "fxsplit_encoder"
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
    os.environ["VLLM_CACHE_ROOT"] = f"{folder}/cache"
    settings = Path(folder) / f"{which.name}.yaml"
    settings.write_text("compile: true\n" if which.variant == "ours-compiled" else "{}\n", encoding="utf-8")
    os.environ["FXSPLIT_ENCODER_CONFIG"] = str(settings) if which.variant.startswith("ours") else "off"


def language_model(options: argparse.Namespace) -> dict[str, Any]:
    """vLLM's settings for it: by default its own, but fewer sizes of captures."""
    if options.tiny or options.language_model == "eager":
        mode = "NONE" if options.tiny else "FULL_DECODE_ONLY"
        return {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": _DECODES}
    sizes = [*_DECODES, *range(64, 513, 64)]
    return {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": sizes}


async def _serve(which: Engine, folder: str, options: argparse.Namespace, pipe: Connection) -> None:
    _environment(which, folder)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.models import registry
    from vllm.v1.engine.async_llm import AsyncLLM

    # It would look at the class in another process, which takes seconds.
    registry._run_in_subprocess = lambda function: function()

    begin = time.perf_counter()
    captures = {
        "cudagraph_mm_encoder": which.variant != "eager",
        "encoder_cudagraph_max_vision_items_per_batch": MAX_ITEMS,
    }
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=folder,
            dtype="float32" if options.tiny else "bfloat16",
            load_format="dummy",
            max_model_len=4096,
            max_num_batched_tokens=256 if options.tiny else MAX_TOKENS,
            max_num_seqs=32,
            limit_mm_per_prompt={"image": 4, "video": 0},
            worker_extension_cls="vllm_watch.EncoderWatch",
            kv_cache_memory_bytes=1 << (26 if options.tiny else 31),
            enable_prefix_caching=False,
            mm_processor_cache_gb=0,
            gpu_memory_utilization=0.2,
            # What it would compile or tune ahead is of layers that this model does not have.
            kernel_config={
                "enable_jit_warmup": False,
                "enable_cutedsl_warmup": False,
                "enable_flashinfer_autotune": False,
            },
            compilation_config={
                # As `vllm serve` leaves them to an encoder: layers in PyTorch's operations, uncompiled.
                "custom_ops": ["none"],
                **language_model(options),
                **captures,
            },
        )
    )
    try:
        await _arrive(engine, prompts(4, 2, 0, options.tiny) + prompts(0, 1, 0, options.tiny), 1e3)  # warm-up
        if which.variant.startswith("ours") and not options.tiny:
            problem = plugin_problem((Path(folder) / f"{which.name}.log").read_text("utf-8", "replace"))
            if problem is not None:
                raise RuntimeError(problem)
        await engine.collective_rpc("watch_encoder")
        pipe.send({"requests": "start", "seconds": time.perf_counter() - begin})
        while True:
            requests, turn = await asyncio.to_thread(pipe.recv)
            pipe.send(await _turn(engine, requests, turn, options))
    except EOFError:
        pass  # whoever asks has gone
    finally:
        engine.shutdown()


async def _turn(engine: Any, requests: str, turn: int, options: argparse.Namespace) -> Row:
    """Answers, milliseconds to the first tokens, and those of the steps that encoded meanwhile."""
    if requests == AT_ONCE:
        images, rate, count = 1, None, 2 if options.tiny else _BURST
    else:
        images = int(requests.removesuffix(" images"))
        rate = RATES[images]
        count = max(2, int(rate * options.seconds))
    asked = prompts(images, count, turn, options.tiny)
    answers, seconds = await _arrive(engine, asked, rate)
    tokens, first = zip(*answers, strict=True)
    row: Row = {"answers": tokens, "first": first, "seconds": seconds}
    (times,) = await engine.collective_rpc("take_encoder_times")
    return row | {f"encoder {what}": each for what, each in times.items()}


async def _arrive(
    engine: Any, requests: Sequence[Mapping[str, Any]], rate: float | None
) -> tuple[list[tuple[list[int], float]], float]:
    """The tokens to requests that arrive at a rate, or all at once, each with milliseconds from asking to the
    first; and seconds until the last of them.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0.0, max_tokens=_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE
    )

    async def answer(number: int, prompt: Mapping[str, Any]) -> tuple[list[int], float]:
        if rate is not None:
            await asyncio.sleep(max(0.0, begin + number / rate - time.monotonic()))
        asked, came, output = time.monotonic(), None, None
        async for output in engine.generate(dict(prompt), sampling, f"{asked}-{number}"):
            if came is None and output.outputs[0].token_ids:
                came = time.monotonic()
        assert output is not None and came is not None
        return list(output.outputs[0].token_ids), (came - asked) * 1e3

    begin = time.monotonic()
    answers = await asyncio.gather(*(answer(*each) for each in enumerate(requests)))
    return answers, time.monotonic() - begin
