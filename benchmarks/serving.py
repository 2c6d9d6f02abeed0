"""A serving engine, simulated: requests that arrive, prompts that are prefilled in chunks, tokens one by one.

`Engine` is real but for the model, of which `Decoder` is what costs time. Where features come from is a
`Source`: the connector, the engine's own thread, or a place where they lie ready.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from decoder import Decoder
from torch import Tensor

from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.interfaces import MediaItem, MediaProcessor, PreparedItem
from fxsplit_encoder.connector.manager_encoder import ManagerEncoder
from fxsplit_encoder.connector.positions import PositionMap, merge_rows
from fxsplit_encoder.connector.request import EncodeRequest

TEXT, PLACEHOLDERS = 1, {"image": 2, "video": 3}
_IDLE_S = 0.0002


@dataclass(frozen=True)
class Medium:
    """An image or a video of the load, which many requests show."""

    item: MediaItem
    rows: Tensor
    """Its feature, for the source that has them ready."""
    levels: int

    @property
    def kind(self) -> str:
        return self.item.modality


@dataclass(frozen=True)
class Arrival:
    """A request, and when it comes."""

    number: int
    at: float
    """Seconds after the beginning."""
    medium: Medium | None
    text: int
    """Tokens of text in its prompt."""
    new: int
    """Tokens that are generated."""

    @property
    def prompt(self) -> PositionMap:
        half = [TEXT] * (self.text // 2)
        if self.medium is None:
            return PositionMap(half + half, [], {})
        modality = self.medium.item.modality
        return PositionMap([*half, PLACEHOLDERS[modality], *half], [modality], PLACEHOLDERS)


def arrivals(
    mix: Mapping[str, float],
    media: Mapping[str, Sequence[Medium]],
    rate: float,
    seconds: float,
    text: int,
    new: int,
    seed: int = 0,
) -> list[Arrival]:
    """Requests at random times, `rate` a second, the same for the same seed.

    Args:
        mix: the share of each kind of media; the rest is text alone.
        media: what is drawn from, by kind.
    """
    draw = random.Random(seed)
    found: list[Arrival] = []
    at = draw.expovariate(rate)
    while at < seconds:
        (kind,) = draw.choices([*mix, "text"], [*mix.values(), 1 - sum(mix.values())])
        medium = None if kind == "text" else draw.choice(media[kind])
        found.append(Arrival(len(found), at, medium, text, new))
        at += draw.expovariate(rate)
    return found


@dataclass(eq=False)
class Served:
    """A request on its way."""

    arrival: Arrival
    prompt: PositionMap
    came: float
    counts: Sequence[int] = ()
    handle: Any = None
    computed: int = 0
    generated: int = 0
    first: float = 0.0
    last: float = 0.0

    @property
    def length(self) -> int:
        return self.prompt.merged_length(self.counts)

    @property
    def kind(self) -> str:
        return self.arrival.medium.kind if self.arrival.medium else "text"

    @property
    def seconds_to_first(self) -> float:
        return self.first - self.came


class Source:
    """Where features come from. These lie ready: what the same requests cost without any encoding."""

    def submit(self, request: Served) -> None:
        """A request has come; called on a thread of its own. Sets its counts and its handle."""
        medium = request.arrival.medium
        if medium is not None:
            request.counts, request.handle = [len(medium.rows)], medium.rows

    def ready(self, waiting: Sequence[Served]) -> list[Served]:
        """Which of them can be prefilled; called in every step of the engine, on its stream."""
        return list(waiting)

    def merge(self, request: Served, start: int, stop: int, out: Tensor) -> None:
        """Writes features to their places among the embeddings of some positions of the prompt."""
        medium = request.arrival.medium
        assert medium is not None
        places = request.prompt.places(request.counts, start, stop)
        merge_rows({0: request.handle}, places, out, medium.levels)

    def release(self, request: Served) -> None:
        """The prompt is prefilled."""
        request.handle = None


class Beside(Source):
    """The connector."""

    def __init__(self, connector: Connector) -> None:
        self.connector = connector

    def submit(self, request: Served) -> None:
        medium, name = request.arrival.medium, str(request.arrival.number)
        items = [medium.item] if medium else []
        # A salt of its own: nothing is found again.
        request.handle = self.connector.submit(EncodeRequest(name, items, request.prompt, salt=name))
        request.counts = request.handle.token_counts

    def ready(self, waiting: Sequence[Served]) -> list[Served]:
        for ticket in self.connector.step().unavailable:
            raise RuntimeError(f"request {ticket.request.id} failed: {ticket.error}")
        # Not those that the step names: one may be ready before its thread has told this one that it came.
        return [request for request in waiting if request.handle.availability == "ready"]

    def merge(self, request: Served, start: int, stop: int, out: Tensor) -> None:
        self.connector.merge(request.handle, (start, stop), out)

    def release(self, request: Served) -> None:
        self.connector.release(request.handle)


class Inline(Source):
    """The engine's own thread encodes, one request with media in a step, while everything else waits.

    Args:
        processor: prepares media.
        encoder: encodes what it prepared.
        workers: threads that prepare beside the engine, as the connector's do; None: the engine's prepares.
    """

    def __init__(
        self, processor: MediaProcessor, encoder: ManagerEncoder, workers: ThreadPoolExecutor | None
    ) -> None:
        self._processor, self._encoder, self._workers = processor, encoder, workers

    def submit(self, request: Served) -> None:
        medium = request.arrival.medium
        if medium is None:
            return
        request.counts = [self._processor.count_tokens(medium.item)]
        prepare = partial(self._processor.prepare, medium.item)
        request.handle = self._workers.submit(prepare) if self._workers else prepare

    def ready(self, waiting: Sequence[Served]) -> list[Served]:
        found, has_encoded = [], False
        for request in waiting:
            if request.handle is None:
                found.append(request)
            elif not has_encoded and (prepared := _prepared(request.handle)) is not None:
                request.handle, has_encoded = self._encoder.encode([prepared])[0], True
                found.append(request)
        return found


def _prepared(handle: Any) -> PreparedItem | None:
    """What is prepared; None: not yet."""
    if isinstance(handle, Future):
        return handle.result() if handle.done() else None
    made: PreparedItem = handle()
    return made


@dataclass
class Run:
    """What an engine did."""

    served: list[Served] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    """Of every step, with what the source did in it."""
    seconds: float = 0.0


class Engine:
    """Continuous batching: a step has a token of every request that decodes, and the next chunk of prompts.

    Args:
        decoder: what a step costs.
        source: where features come from.
    """

    def __init__(self, decoder: Decoder, source: Source) -> None:
        self._decoder, self._source = decoder, source
        self._come: deque[Served] = deque()
        self._waiting: list[Served] = []
        self._prefilling: list[Served] = []
        self._decoding: list[Served] = []

    @torch.no_grad()
    def run(self, load: Sequence[Arrival]) -> Run:
        """Serves requests as they come, until the last one is answered."""
        begin, run = time.perf_counter(), Run()
        with ThreadPoolExecutor(1) as feeder, self._decoder.on_stream():
            feeding = feeder.submit(self._feed, load, begin)
            while len(run.served) < len(load):
                if feeding.done():
                    feeding.result()  # raises what it met
                if not self._step(run):
                    time.sleep(_IDLE_S)
        run.seconds = time.perf_counter() - begin
        return run

    def _feed(self, load: Sequence[Arrival], begin: float) -> None:
        for arrival in load:
            request = Served(arrival, arrival.prompt, begin + arrival.at)
            time.sleep(max(0.0, request.came - time.perf_counter()))
            self._source.submit(request)
            self._come.append(request)

    def _step(self, run: Run) -> bool:
        """Whether there was anything to compute."""
        start = time.perf_counter()
        while self._come:
            self._waiting.append(self._come.popleft())
        for request in self._source.ready(self._waiting):
            self._waiting.remove(request)
            self._prefilling.append(request)
        room = self._decoder.shape.slots - len(self._decoding)
        rows, done = self._fill(self._prefilling[:room])
        if rows == self._decoder.shape.slots and not self._decoding:
            return False
        self._decoder.step(rows)
        self._decoder.wait()
        now = time.perf_counter()
        run.step_seconds.append(now - start)
        self._advance(run, done, now)
        return True

    def _fill(self, prefilling: Sequence[Served]) -> tuple[int, list[Served]]:
        """The chunks of this step: its rows, and the requests whose prompts end with it."""
        used, most, done = self._decoder.shape.slots, max(self._decoder.shape.rows), []
        for request in prefilling:
            stop = min(request.length, request.computed + most - used)
            count = stop - request.computed
            if not count:
                break
            out = self._decoder.embeddings[used : used + count]
            if request.arrival.medium is not None:
                self._source.merge(request, request.computed, stop, out)
            request.computed, used = stop, used + count
            if stop == request.length:
                done.append(request)
        return used, done

    def _advance(self, run: Run, done: Sequence[Served], now: float) -> None:
        for request in done:
            self._prefilling.remove(request)
            self._source.release(request)
            request.first = now
            self._decoding.append(request)
        for request in list(self._decoding):
            request.generated, request.last = request.generated + 1, now
            if request.generated == request.arrival.new:
                self._decoding.remove(request)
                run.served.append(request)
