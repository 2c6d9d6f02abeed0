"""A serving engine with the Qwen3-VL-8B vision tower beside it: what encoding costs its requests.

    python benchmarks/bench.py connector --output out/connector.json

27 blocks, bf16, seeded random weights, configs/qwen3_vl_8b.yaml, no captures while it serves (`--config`).
The engine is simulated (serving.py, decoder.py): 64 requests decode at once, a step has up to 960 tokens of
prompts. Requests come at random times: 128 tokens of text, 64 generated, and one image (JPEG, 100 to 1500
tokens) or video (32 frames of 256 x 448) in some.

* "mix": by share of images and videos. "asynchronous" is the connector, with streams of the same priority but
  in "engine first". "synchronous" prepares by the model's own processor and encodes on the engine's thread,
  one request a step; "prepared as here": with pixels as the connector has them; "prepared beside": so by
  threads. Milliseconds to the first token from when the request was due; "lost" is how much fewer tokens a
  second a request of text gets than in "no encoding".
* "batch": 8 images, preprocessed and staged, at once against one after the other, in a stream of 32 that came
  for 5 s, in which sizes that recur are captured (`--config '{"capture_recurring": true}'`).
* "beside": text alone, while a video of 64 frames is encoded each second, or always one; whole, in slices of
  5 ms, and with a worker that rests.

A p99 to be relied on has ten slower requests: 1,000 requests, 42 seconds at 24 a second. `--encoder-device
cuda:1` gives the connector a GPU of its own. `--tiny` shows on a CPU that it runs.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from decoder import TINY, Decoder, Shape
from models import captured, photographs, tiny_tower
from serving import Arrival, Beside, Engine, Inline, Medium, Run, Source, arrivals
from storage import ROOT, Record
from timing import percentile, synchronize, wall_ms
from worker import settle
from workloads import random_grid

import fxsplit_encoder as fx
from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.interfaces import MediaItem
from fxsplit_encoder.connector.manager_encoder import ManagerEncoder
from fxsplit_encoder.connector.request import ConnectorConfig, EncodeRequest
from fxsplit_encoder.media import VideoFrames
from fxsplit_encoder.models.eager import share_weights
from fxsplit_encoder.models.media import TowerProcessor, family_processor
from fxsplit_encoder.models.random import demo_tower
from fxsplit_encoder.models.registry import FAMILIES

MIXES: Mapping[str, Mapping[str, float]] = {
    "text": {},
    "10 % images": {"image": 0.1},
    "10 % images, 10 % videos": {"image": 0.1, "video": 0.1},
    "30 % images, 20 % videos": {"image": 0.3, "video": 0.2},
}
HEAVY = "30 % images, 20 % videos"
NO_ENCODING, ASYNCHRONOUS, ENGINE_FIRST = "no encoding", "asynchronous", "asynchronous, engine first"
SYNCHRONOUS, QUICK = "synchronous", "synchronous, prepared as here"
PREPARED = "synchronous, prepared beside"
VARIANTS = (NO_ENCODING, ASYNCHRONOUS, ENGINE_FIRST, PREPARED, QUICK, SYNCHRONOUS)
PRIORITY, FIRST = -1, -2
"""Of the encoder's stream and of the decoder's, but in "engine first"."""
SLICE_MS = 5.0
BESIDE: Mapping[str, tuple[float | None, Mapping[str, float]]] = {
    "nothing": (None, {}),
    "a video each second": (1.0, {}),
    "a video always": (0.0, {}),
    "a video always, slices": (0.0, {"max_slice_cost": SLICE_MS}),
    "a video always, busy share 0.1": (0.0, {"max_busy_share": 0.1}),
    "a video always, busy share 0.1, slices": (0.0, {"max_busy_share": 0.1, "max_slice_cost": SLICE_MS}),
}
"""Seconds between the beginnings of two videos, and settings of the connector."""
_PARTS = ("batch", "beside", "mix")
_STREAM = 4
"""Batches."""
_PIXELS = 16
"""Of a side of a patch."""


@dataclass(frozen=True)
class Scale:
    """Sizes of the load."""

    clip: tuple[int, int, int]
    """Frames, height, width of a video of the mixes."""
    long_clip: tuple[int, int, int]
    num_images: int
    num_videos: int
    text: int
    new: int
    sides: tuple[int, ...]
    """Of the images that are encoded at once, in pixels."""
    samples: int
    cpu_workers: int
    settled: float
    """Seconds for which a batch comes before it is timed: a size gets a capture of its own once its padding
    has cost as much as that."""


FULL = Scale((32, 256, 448), (64, 256, 448), 24, 4, 128, 64, (224, 448), 30, 8, 5.0)
SMALL = Scale((4, 64, 64), (8, 64, 96), 3, 2, 8, 3, (64,), 2, 2, 0.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rate", type=float, default=24.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=5.0, help="for which requests come, of each row")
    parser.add_argument("--encoder-device", default=None, help="where the connector encodes")
    parser.add_argument(
        "--config", type=json.loads, default={"capture_recurring": False}, metavar="JSON", help="of managers"
    )


class _Kept(ManagerEncoder):
    """Leaves its captures to the next connector."""

    def close(self) -> None:
        """Nothing: the manager is another's too."""


class Bench:
    """The tower, its media and the decoder."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.scale = SMALL if arguments.tiny else FULL
        self.device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
        self.encoder_device = torch.device(arguments.encoder_device or self.device)
        self.beside, self.model_processor, self.processor = self._manager(self.encoder_device)
        self.manager = self.beside
        if self.encoder_device != self.device and "mix" in arguments.parts:  # for an engine that encodes
            self.manager, *_ = self._manager(self.device)
        shape = Shape() if not arguments.tiny else replace(TINY, hidden=self._facts()[0])
        self.decoder = Decoder(shape, self.device, self._dtype, PRIORITY)
        self.media = self._media()

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def _manager(
        self, device: torch.device
    ) -> tuple[fx.EncoderCudaGraphManager, TowerProcessor, TowerProcessor]:
        """The tower's, the model's own processor, and that which leaves pixels to be normalized later."""
        tiny = self.arguments.tiny
        module = tiny_tower().to(device, self._dtype) if tiny else demo_tower(27, device, self._dtype)
        tower = fx.wrap(share_weights(module))
        config = fx.EncoderConfig(mode="none", piece_compiler="eager")
        if device.type == "cuda":
            config = fx.EncoderConfig.from_yaml(ROOT / "configs" / "qwen3_vl_8b.yaml")
        if tiny and device.type == "cuda":
            config = fx.EncoderConfig(token_budgets=(16, 64), max_items_per_batch=8)
        own = {"stream_priority": PRIORITY, **self.arguments.config}
        manager = captured(tower, **{**config.model_dump(), **own})
        synchronize()
        settings = {"model_type": "qwen3_vl", "vision_config": module.config.to_dict()}
        family = FAMILIES["qwen3_vl"]
        processors = [
            family_processor(tower, family, settings, normalize_later=is_later) for is_later in (False, True)
        ]
        return manager, *processors

    # --- media

    def image(self, width: int, height: int, number: int) -> MediaItem:
        """A photograph as a JPEG file."""
        made = photographs((width, height))
        return MediaItem("image", made[number % len(made)])

    def video(self, clip: tuple[int, int, int], number: int = 0) -> MediaItem:
        """Decoded frames, of noise: nobody looks at them."""
        frames = np.random.default_rng(number).integers(0, 256, (*clip, 3), np.uint8)
        return MediaItem("video", VideoFrames(frames, fps=8.0))

    def _media(self) -> dict[str, list[Medium]]:
        draw, items = random.Random(0), []
        for number in range(self.scale.num_images):
            _, height, width = random_grid(draw)
            if self.arguments.tiny:
                height, width = draw.randint(2, 6), draw.randint(2, 6)
            items.append(self.image(_PIXELS * width, _PIXELS * height, number))
        items += [self.video(self.scale.clip, number) for number in range(self.scale.num_videos)]
        encoder, made = ManagerEncoder(self.manager), []
        for item in items:
            prepared = self.processor.prepare(item)
            for _ in range(2):  # cuDNN plans a shape when it comes for the second time
                (rows,) = encoder.encode([prepared])
            made.append(Medium(item, rows, self._facts()[1]))
        synchronize()
        return {kind: [medium for medium in made if medium.kind == kind] for kind in ("image", "video")}

    def _facts(self) -> tuple[int, int]:
        """Width of a token, and levels of deepstack."""
        tower: Any = self.manager.tower
        levels = tower.deepstack_levels
        return tower.get_encoder_cudagraph_config().out_hidden_size // (1 + levels), levels

    # --- the connector

    @contextmanager
    def connector(self, **settings: float) -> Iterator[Connector]:
        """One worker, over the captures that there are."""
        given = {"cpu_workers": self.scale.cpu_workers, **settings}
        config = ConnectorConfig(**given)
        with Connector(self.processor, [lambda: _Kept(self.beside)], config) as connector:
            yield connector
        if problems := connector.audit():
            raise SystemExit(f"connector: its books do not add up: {problems}")

    # --- parts

    def batch(self) -> Iterator[dict[str, Any]]:
        """Eight images at once and one after the other."""
        for side in self.scale.sides:
            encoder = ManagerEncoder(self.beside)
            images = [self.image(side, side, number) for number in range(8)]
            prepared = [encoder.stage(self.processor.prepare(image)) for image in images]

            def one_by_one(items: Any = prepared * _STREAM, encode: Any = encoder.encode) -> None:
                for item in items:
                    encode([item])

            def at_once(items: Any = prepared, encode: Any = encoder.encode) -> None:
                for _ in range(_STREAM):
                    encode(items)

            for stream in (one_by_one, at_once):
                settle([stream], self.scale.settled)
            times = [wall_ms(stream, self.scale.samples) / _STREAM for stream in (one_by_one, at_once)]
            alone = wall_ms(lambda each=encoder.encode, items=prepared: each(items), self.scale.samples)
            tokens = prepared[0].num_tokens
            row = {"side": side, "tokens": tokens, "one by one": times[0], "at once": times[1]}
            yield {**row, "ratio": times[0] / times[1], "a batch alone": alone}

    def beside_videos(self) -> Iterator[dict[str, Any]]:
        """Requests of text alone, while a long video is encoded now and then, or always."""
        load = self._load({})
        alone = None
        for name, (pause, settings) in BESIDE.items():
            video = self.video(self.scale.long_clip)
            with self.connector(**settings) as connector, _encoding(connector, video, pause):
                run = Engine(self.decoder, Beside(connector)).run(load)
                row = {"beside": name, **_summary(run), "videos": connector.stats().batch_items}
            alone = row["text tokens/s"] if alone is None else alone
            yield {**row, "lost": 1 - row["text tokens/s"] / alone}

    def mixes(self) -> Iterator[dict[str, Any]]:
        """Every mix by every variant."""
        for mix in self.arguments.mixes:
            shares, free = MIXES[mix], None
            load = self._load(shares)
            for variant in self.arguments.variants if shares else (NO_ENCODING, ASYNCHRONOUS):
                row = {"mix": mix, "variant": variant, **self._measure(variant, load)}
                free = row["text tokens/s"] if free is None else free
                yield {**row, "lost": 1 - row["text tokens/s"] / free}

    def warm_up(self) -> None:
        """Batches of mixed sizes, as the connector makes them."""
        seconds = min(2.0, self.arguments.seconds)
        self._measure(ASYNCHRONOUS, self._load(MIXES[HEAVY], seconds, seed=1))

    def _load(self, mix: Mapping[str, float], seconds: float | None = None, seed: int = 0) -> list[Arrival]:
        seconds = self.arguments.seconds if seconds is None else seconds
        return arrivals(mix, self.media, self.arguments.rate, seconds, self.scale.text, self.scale.new, seed)

    def _measure(self, variant: str, load: Sequence[Arrival]) -> dict[str, Any]:
        if variant not in (ASYNCHRONOUS, ENGINE_FIRST):
            with ThreadPoolExecutor(self.scale.cpu_workers) as workers:
                return _summary(Engine(self.decoder, self._source(variant, workers)).run(load))
        decoder = self.decoder if variant == ASYNCHRONOUS else self._decoder_first
        with self.connector() as connector:
            return _summary(Engine(decoder, Beside(connector)).run(load))

    @functools.cached_property
    def _decoder_first(self) -> Decoder:
        return self.decoder.at_priority(FIRST)

    def _source(self, variant: str, workers: ThreadPoolExecutor) -> Source:
        if variant == NO_ENCODING:
            return Source()
        processor = self.model_processor if variant == SYNCHRONOUS else self.processor
        return Inline(processor, ManagerEncoder(self.manager), workers if variant == PREPARED else None)


@contextmanager
def _encoding(connector: Connector, item: MediaItem, pause: float | None) -> Iterator[None]:
    """Inside, the connector has a video to encode each so many seconds; None: it has none."""
    stop, number = threading.Event(), 0

    def submit() -> None:
        nonlocal number
        assert pause is not None
        while not stop.is_set():
            # Two at a time where there is no pause, so that one is prepared while another is encoded.
            tickets = []
            for _ in range(1 if pause else 2):
                number += 1
                tickets.append(connector.submit(EncodeRequest("video", [item], salt=f"video {number}")))
            begin = time.perf_counter()
            for ticket in tickets:
                ticket.wait()
                connector.release(ticket)
            stop.wait(max(0.0, pause - (time.perf_counter() - begin)))

    thread = threading.Thread(target=submit, daemon=True)
    if pause is not None:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if pause is not None:
            thread.join()


def _percentiles(seconds: Sequence[float], name: str) -> dict[str, float | None]:
    shares = {"p50": 0.5, "p99": 0.99}
    return {f"{name} {p}": 1e3 * percentile(seconds, each) if seconds else None for p, each in shares.items()}


def _summary(run: Run) -> dict[str, Any]:
    """Milliseconds, and tokens a second that a request of text alone gets while it decodes."""
    texts = [request for request in run.served if request.kind == "text"]
    decoding = sum(request.last - request.first for request in texts)
    media = [request.seconds_to_first for request in run.served if request.kind != "text"]
    return {
        "requests": len(run.served),
        "seconds": run.seconds,
        **_percentiles([request.seconds_to_first for request in run.served], "first token"),
        **_percentiles(media, "with media"),
        **_percentiles([request.seconds_to_first for request in texts], "text"),
        "text tokens/s": sum(request.generated - 1 for request in texts) / decoding,
        **_percentiles(run.step_seconds, "step"),
        "longest step": 1e3 * max(run.step_seconds),
    }


@torch.no_grad()
def run(arguments: argparse.Namespace, record: Record) -> None:
    bench = Bench(arguments)
    record.settings |= {
        "tower": "tiny" if arguments.tiny else "qwen3-vl-8b",
        "rate": arguments.rate,
        "seconds": arguments.seconds,
        "encoder device": str(bench.encoder_device),
        "config": arguments.config,
        "stream priority": {"encoder": PRIORITY, ASYNCHRONOUS: PRIORITY, ENGINE_FIRST: FIRST},
        "slices ms": SLICE_MS,
    }
    parts = {"batch": bench.batch, "beside": bench.beside_videos, "mix": bench.mixes}
    if {"beside", "mix"} & {*arguments.parts}:
        bench.warm_up()
    for part in arguments.parts:
        for row in parts[part]():
            record({"part": part, **row})
