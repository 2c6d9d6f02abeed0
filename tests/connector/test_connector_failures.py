"""A failure costs one request: media, batches, memory, time, workers."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxsplit_encoder.connector.books.encoding import WorkerStatus
from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.fake import FakeEncoder, FakeProcessor
from fxsplit_encoder.connector.interfaces import (
    FeatureEncoder,
    MediaItem,
    MediaProcessor,
    Modality,
    PreparedItem,
)
from fxsplit_encoder.connector.positions import Places, merge_rows
from fxsplit_encoder.connector.request import RETRY, TEXT_ONLY, FailurePolicy
from fxsplit_encoder.connector.states import State
from fxsplit_encoder.connector.threads import pool
from fxsplit_encoder.connector.threads.copies import Copies
from fxsplit_encoder.errors import EncoderLostError, InputError, MediaError

from .books.test_any_history import AnyHistory, Bench
from .scenes import (
    PATIENCE_S,
    Stage,
    assert_nothing_is_left,
    connector,
    encode_behind,
    image,
    kind_of,
    names_of,
    prompt,
    ready,
    request,
    rows_of,
    staged,
    wait,
    wait_until,
)


class Wrong(FakeEncoder):
    """The rows of an item are what `change` makes of its name and of the right ones."""

    def __init__(self, change: Callable[[str, Tensor], Any]) -> None:
        super().__init__()
        self._change = change

    def encode(self, items: Sequence[PreparedItem]) -> list[Any]:
        return [*map(self._change, names_of(items), super().encode(items))]


# --- media


def test_media_that_cannot_be_decoded_fail_their_request_alone() -> None:
    def broken(item: MediaItem) -> None:
        if item.media == "broken":
            raise MediaError("truncated")

    with connector(processor=FakeProcessor(on_prepare=broken)) as each:
        good, bad, both = (each.submit(request(*names)) for names in (["a"], ["broken"], ["b", "broken"]))
        assert [wait(ticket) for ticket in (good, bad, both)] == ["ready", "unavailable", "unavailable"]
        assert kind_of(bad) == ("media", False)
        message = "item 1 of request r (image, 4 tokens): MediaError: truncated"
        assert str(both.error) == message
        assert both.items[0].state is State.CANCELLED
        assert each.stats().failures == {"media": 2}
        each.release(good)
        # What came with the item that cannot be decoded may be on its way to a batch still.
        wait_until(lambda: each.stats().bytes_used["host"] == each.stats().bytes_used["inputs"] == 0)


def test_headers_are_read_by_cpu_workers_and_only_who_asks_waits() -> None:
    gate, readers = threading.Event(), []

    class Slow(FakeProcessor):
        def count_tokens(self, item: MediaItem) -> int:
            readers.append(threading.current_thread().name)
            assert gate.wait(PATIENCE_S)
            return super().count_tokens(item)

    with connector(processor=Slow(), cpu_workers=1) as each:
        slow, late = each.submit(request(image("a", 5))), each.submit(request("b", timeout_s=0.05))
        cancelled = each.submit(request("c"))
        each.cancel(cancelled)
        assert (slow.is_counted, slow.state, cancelled.token_counts) == (False, State.NEW, (0,))
        assert (kind_of(late), late.token_counts) == (("timeout", True), (0,))
        threading.Timer(0.05, gate.set).start()
        assert slow.token_counts == (5,), "it waits"
        assert (slow.is_counted, wait(slow), each.audit()) == (True, "ready", [])
        assert set(readers) == {"connector-cpu-0"}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (MediaItem("audio", "a"), "no encoder takes 'audio'"),
        (MediaItem("image", "a", {"tokens": "many"}), "expected an integer"),
    ],
)
def test_what_nobody_can_measure_hash_or_encode_fails(item: MediaItem, message: str) -> None:
    with connector([lambda: FakeEncoder(modalities=["image"])]) as each:
        ticket = each.submit(request(item))
        assert kind_of(ticket) == ("media", False)
        assert message in str(ticket.error)


@pytest.mark.parametrize(
    "rows",
    [
        *(torch.zeros(3, 8), torch.zeros(4, 9), torch.zeros(32), None),
        *(torch.zeros(4, 8, dtype=torch.float64), torch.zeros(4, 16, dtype=torch.float16)),
    ],
)
def test_rows_that_are_not_what_memory_was_reserved_for_are_refused(rows: Any) -> None:
    with connector([lambda: Wrong(lambda name, right: rows if name == "b" else right)]) as each:
        good, bad = each.submit(request("a")), each.submit(request("b"))
        assert (wait(good), kind_of(bad)) == ("ready", ("mismatch", False))


def test_rows_have_the_dtype_of_the_first_where_the_encoder_does_not_tell() -> None:
    inner = FakeEncoder()

    class Fickle(FeatureEncoder):
        def row_bytes(self, modality: Modality) -> int | None:
            return inner.row_bytes(modality)

        def encode(self, items: Sequence[PreparedItem]) -> list[Any]:
            rows = zip(names_of(items), inner.encode(items), strict=True)
            return [made.view(torch.int32) if name == "b" else made for name, made in rows]

    with connector([Fickle]) as each:
        assert wait(each.submit(request("a"))) == "ready"
        bad = each.submit(request("b", retention="keep"))
        assert kind_of(bad) == ("mismatch", False)
        assert "rows of torch.float32, 128 bytes in all; the encoder returned (4, 8) of torch.int32" in str(
            bad.error
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_fail_and_are_not_kept(value: float) -> None:
    values = iter([value])

    def once(name: str, rows: Tensor) -> Tensor:
        rows[1, 2] = next(values, rows[1, 2])
        return rows

    with connector([lambda: Wrong(once)]) as each:
        bad = each.submit(request("a", retention="keep"))
        assert kind_of(bad) == ("encoder", True)
        assert "NaN or infinity" in str(bad.error)
        again = each.submit(request("a"))
        assert wait(again) == "ready"
        with each.read(again) as rows:
            assert torch.equal(rows[0].rows, rows_of(image("a")))
        assert (each.stats().hits, each.audit()) == (0, [])


def test_an_encoder_that_returns_too_few_features_fails_its_items() -> None:
    class Forgetful(FakeEncoder):
        def encode(self, items: Sequence[PreparedItem]) -> list[Any]:
            return super().encode(items)[1:]

    with connector([Forgetful]) as each:
        ticket = each.submit(request("a"))
        wait(ticket)
        assert "returned 0 features for 1 items" in str(ticket.error)


# --- batches


def test_a_batch_that_fails_is_halved_until_the_guilty_is_alone() -> None:
    with staged(cpu_workers=1) as (each, stage):
        stage.faults["c"] = lambda: ValueError("bad pixels")
        told = encode_behind(each, stage, *map(request, "abcdefgh"))
        assert told == ["unavailable" if name == "c" else "ready" for name in ("first", *"abcdefgh")]
        assert each.stats().failures == {"encoder": 1}
        sizes = [len(batch) for batch in stage.batches]
        assert sizes == [1, 8, 4, 2, 2, 1, 1, 4]
        assert each.stats().split_batches == 3


def test_a_retry_is_not_for_items_that_are_to_blame() -> None:
    with staged(is_open=True, faults={"a": lambda: ValueError("bad pixels")}) as (each, stage):
        ticket = each.submit(request("a", failure=RETRY))
        assert kind_of(ticket) == ("encoder", False)
        assert stage.batches == [["a"]]


def test_a_request_may_go_on_as_text() -> None:
    placeholders = prompt(1, 9, 9, 2)
    with connector(stage=Stage(faults={"b": lambda: RuntimeError("broken")})) as each:
        ticket = each.submit(request("a", "b", failure=TEXT_ONLY, placeholders=placeholders))
        assert each.submit(request("a", failure=TEXT_ONLY)).text_only is False
        assert wait(ticket) == "ready"
        assert (ticket.text_only, ticket.token_counts, ticket.epoch) == (True, (0, 0), 1)
        assert ticket in each.step().recounted
        assert placeholders.token_ids(ticket.token_counts).tolist() == [1, 2]
        assert each.merge(ticket, (0, 2), torch.ones(2, 8)).positions.tolist() == []
        assert (each.release(ticket), ticket.state) == (1, State.RELEASED)
        assert each.stats().text_only == 1


# --- memory


def test_less_is_asked_of_an_item_when_memory_runs_out_and_only_where_allowed() -> None:
    def small_memory(items: Sequence[PreparedItem]) -> None:
        if sum(item.num_tokens for item in items) > 5:
            raise torch.OutOfMemoryError("no memory")

    half = FailurePolicy(reduce="half_resolution")
    with connector(stage=small_memory) as each:
        allowed = each.submit(request(image("a", 16), failure=half))
        forbidden = each.submit(request(image("b", 16)))
        small = each.submit(request(image("c", 5)))
        assert [wait(ticket) for ticket in (allowed, forbidden, small)] == ["ready", "unavailable", "ready"]
        assert (allowed.token_counts, allowed.epoch) == ((4,), 2)
        assert kind_of(forbidden) == ("out_of_memory", True)
        assert each.step().recounted == (allowed,)
        with each.read(allowed) as rows:
            assert torch.equal(rows[0].rows, rows_of(image("a", 4)))
        assert each.stats().reductions == 2
        assert each.audit() == []


def test_an_item_that_has_no_more_to_give_fails() -> None:
    with staged(is_open=True, faults={"a": MemoryError}) as (each, stage):
        ticket = each.submit(request(image("a", 4), failure=FailurePolicy(reduce="half_frames")))
        assert kind_of(ticket) == ("out_of_memory", True)
        assert len(stage.batches) == 3
        assert each.stats().bytes_used["host"] == 0


def test_a_processor_that_cannot_reduce_says_so_at_once() -> None:
    class Plain(FakeProcessor):
        reduce = MediaProcessor.reduce

    with connector(processor=Plain()) as each:
        with pytest.raises(InputError, match="reduce: Plain cannot ask less of an item"):
            each.submit(request("a", failure=FailurePolicy(reduce="half_frames")))


# --- time


def test_what_is_too_slow_fails_while_its_batch_goes_on() -> None:
    with staged() as (each, stage):
        slow, patient = each.submit(request("a", timeout_s=0.05)), each.submit(request("a"))
        stage.wait_for_batch()
        late = each.submit(request("b", timeout_s=0.05))
        assert kind_of(slow) == kind_of(late) == ("timeout", True)
        assert patient.state is State.ENCODING
        stage.open()
        assert wait(patient) == "ready"
        assert stage.batches == [["a"]], "what waited never entered a batch"
        assert each.audit() == []


@pytest.mark.parametrize("timeout_s", [1e10, float("inf")])
def test_a_very_long_timeout_keeps_nobody_from_theirs(timeout_s: float) -> None:
    with staged() as (each, stage):
        patient = each.submit(request("a", timeout_s=timeout_s))
        stage.wait_for_batch()
        assert wait(each.submit(request("b", timeout_s=0.05))) == "unavailable"
        stage.open()
        assert patient.wait(timeout_s) == "ready"
        each.close(timeout_s)


# --- workers


class Killed(BaseException):
    """Nothing expects it."""


BROKEN_CONTEXT = "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize("death", [Killed(), torch.AcceleratorError(BROKEN_CONTEXT)], ids=repr)
def test_the_work_of_a_worker_that_dies_goes_to_another(death: BaseException) -> None:
    with connector(2, stage=mock.Mock(side_effect=itertools.chain([death], itertools.repeat(None)))) as each:
        tickets = [each.submit(request(name)) for name in "abc"]
        assert [wait(ticket) for ticket in tickets] == ["ready"] * 3
        assert (each.stats().lost_workers, each.stats().worker_restarts) == (1, 1)
        assert (each.stats().split_batches, each.audit()) == (0, [])
    assert not any(each.stats().bytes_used.values())


@pytest.mark.parametrize(
    "death", [EncoderLostError("its process is gone"), torch.AcceleratorError(BROKEN_CONTEXT)]
)
def test_an_item_that_kills_workers_takes_nobody_along(
    death: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MOST_RESTARTS", 5)
    stage = Stage(faults={"poison": lambda: death})
    with connector(stage=stage) as each:
        poison, others = each.submit(request("poison")), [each.submit(request(name)) for name in "abc"]
        assert [wait(ticket) for ticket in others] == ["ready"] * 3
        assert kind_of(poison) == ("worker_lost", False)
        assert each.stats().lost_workers == 2


def test_when_every_worker_is_lost_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MOST_RESTARTS", 0)
    with staged() as (each, stage):
        first = each.submit(request("a"))
        stage.wait_for_batch()
        stage.faults["a"] = Killed
        second = each.submit(request("b"))
        stage.open()
        assert wait(first) == "unavailable"
        assert kind_of(second) == ("worker_lost", True)
        assert each.workers() == {"worker 0": WorkerStatus.LOST}
        third = each.submit(request("c"))
        assert kind_of(third) == ("worker_lost", True)
        stage.faults.clear()
        each.restart_worker("worker 0")
        assert wait(each.submit(request("d"))) == "ready"


def test_an_encoder_that_does_not_start_is_given_up_after_some_tries() -> None:
    unable: Any = FakeEncoder()
    unable.start = mock.Mock(side_effect=RuntimeError("no such device"))
    with connector([lambda: unable]) as each:
        assert kind_of(each.submit(request("a"))) == ("worker_lost", True)
        assert unable.start.call_count == 1 + pool.MOST_RESTARTS


def test_a_worker_that_hangs_is_given_up_by_itself() -> None:
    may_end, hanging = threading.Event(), {"a", "b"}

    def hang_once_each(items: Sequence[PreparedItem]) -> None:
        (name,) = names_of(items)
        if name in hanging:
            hanging.remove(name)
            assert may_end.wait(PATIENCE_S)

    with connector(2, stage=hang_once_each, hang_timeout_s=0.05, max_batch_items=1) as each:
        tickets = [each.submit(request(name)) for name in "abcd"]
        assert [wait(ticket) for ticket in tickets] == ["ready"] * 4
        assert (each.stats().lost_workers, each.stats().worker_restarts) == (2, 2)
        may_end.set()
        wait_until(lambda: not any(each.stats().bytes_used[f"staging worker {n}"] for n in range(2)))
        assert each.audit() == []


AT_EXIT = """
import time
from fxsplit_encoder.connector import Connector, EncodeRequest, FakeEncoder, FakeProcessor, MediaItem

def encode(items):
    print("encodes", flush=True)
    time.sleep(0.3)

connector = Connector(FakeProcessor(), [lambda: FakeEncoder(on_encode=encode)] * 2)
tickets = [connector.submit(EncodeRequest("r", [MediaItem("image", str(n))])) for n in range(99)]
time.sleep(0.2)
"""


def test_the_interpreter_may_end_while_items_are_encoded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=10 * PATIENCE_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "encodes" in done.stdout


def test_a_drained_worker_finishes_and_takes_no_more() -> None:
    with staged() as (each, stage):
        first = each.submit(request("a"))
        stage.wait_for_batch()
        each.drain_worker("worker 0")
        second = each.submit(request("b"))
        stage.open()
        assert wait(first) == "ready"
        assert each.workers() in ({"worker 0": WorkerStatus.DRAINING}, {"worker 0": WorkerStatus.STOPPED})
        assert second.wait(0.05) == "deferred"
        each.restart_worker("worker 0")
        assert wait(second) == "ready"
        with pytest.raises(InputError, match="worker: expected one of worker 0; got 'worker 7'"):
            each.drain_worker("worker 7")


# --- what processors, callers, files and devices get wrong costs one request


def still_serves(each: Connector) -> bool:
    ticket = each.submit(request("another"))
    is_ready = wait(ticket) == "ready"
    each.release(ticket)
    return is_ready


# --- processors


class Nonsense(FakeProcessor):
    """Does one thing wrong for the item "odd"."""

    def __init__(self, **wrong: Any) -> None:
        super().__init__()
        self.wrong = wrong

    def count_tokens(self, item: MediaItem) -> Any:
        return self.wrong.get("count", 4) if item.media == "odd" else 4

    def digest(self, item: MediaItem) -> Any:
        return self.wrong.get("digest", b"odd") if item.media == "odd" else super().digest(item)

    def prepare(self, item: MediaItem) -> Any:
        if item.media == "odd" and "prepared" in self.wrong:
            if isinstance(self.wrong["prepared"], type):
                raise self.wrong["prepared"]
            return self.wrong["prepared"]
        return super().prepare(item)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"count": "many"}, ("media", False)),
        ({"count": -1}, ("media", False)),
        ({"count": 2.0}, ("media", False)),
        ({"count": True}, ("media", False)),
        ({"digest": "text"}, ("media", False)),
        ({"digest": None}, ("media", False)),
        ({"prepared": None}, ("media", False)),
        ({"prepared": SystemExit}, ("media", True)),
        ({"prepared": PreparedItem("image", b"odd", {}, 5)}, ("mismatch", False)),
        ({"prepared": PreparedItem("image", b"?", {}, 4)}, ("media", True)),
    ],
    ids=str,
)
def test_a_processor_that_returns_nonsense_costs_one_request(
    wrong: dict[str, Any], kind: tuple[str, bool]
) -> None:
    with connector(processor=Nonsense(**wrong), cpu_workers=1) as each:
        assert kind_of(each.submit(request("odd"))) == kind
        assert still_serves(each), "by the only thread that there is"
        assert each.audit() == []


def test_an_item_has_tensors_alone() -> None:
    with pytest.raises(TypeError, match=r"inputs\.pixel_values: expected a tensor; got \["):
        PreparedItem("image", b"odd", {"pixel_values": [1, 2]}, 4)  # type: ignore[dict-item]


def test_an_encoder_whose_costs_are_no_numbers_costs_one_request() -> None:
    class Free(FakeEncoder):
        def predict_cost(self, item: PreparedItem) -> float:
            return float("nan") if item.metadata["media"] == "odd" else 1.0

    with connector([Free], cpu_workers=1) as each:
        assert kind_of(each.submit(request("odd"))) == ("encoder", False)
        assert still_serves(each)


def test_a_salt_that_no_hash_takes_is_refused_at_once() -> None:
    with connector() as each:
        with pytest.raises(InputError, match="salt"):
            request("a", salt="\ud800")
        with pytest.raises(InputError, match="salt"):
            request("a", salt=7)
        assert still_serves(each)


# --- readers


@pytest.mark.parametrize(
    ("device", "fault"),
    [("no device", None), (7.5, None), ("cpu", RuntimeError("an illegal memory access was encountered"))],
)
def test_a_reader_whose_device_is_none_or_lost_holds_nothing(
    device: Any, fault: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Copies()
    with connector(copies=copies) as each:
        ticket = ready(each, "a")
        with monkeypatch.context() as patch, pytest.raises((InputError, RuntimeError, TypeError)) as caught:
            if fault is not None:
                patch.setattr(copies, "mark", mock.Mock(side_effect=fault))
            with each.read(ticket, device=device):
                pass
        assert fault in (None, caught.value)
        each.release(ticket)
        assert_nothing_is_left(each)


def test_rows_for_the_host_are_there_when_they_are_merged() -> None:
    """A copy from a device to the host that nobody waits for would be read too early."""
    asked: list[bool] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "_to_copy" in str(func):
                asked.append(bool((kwargs or {}).get("non_blocking")))
            return func(*args, **(kwargs or {}))

    out = torch.zeros(3, 8)
    with Watch():
        merge_rows({0: torch.ones(3, 8, dtype=torch.float64)}, Places(np.arange(3), [(0, 0, 3)]), out)
    assert asked == [False] and bool((out == 1).all())


# --- time


def test_what_is_held_again_has_the_whole_timeout_again() -> None:
    bench = Bench.make(2, timeout_s=5.0)
    ticket = bench.submit(request("a", "b"), [4, 4])
    AnyHistory.of(bench).work("ready")
    bench.books.settle()
    assert ticket.state is State.READY
    bench.clock.now = 4.0
    bench.books.release(ticket, 0)
    bench.books.settle()
    bench.books.next_deadline()
    assert bench.books.hold(ticket, 0) == "deferred"
    bench.books.settle()
    assert bench.books.next_deadline() == 9.0
    bench.clock.now = 8.0
    bench.books.expire()
    assert ticket.state is State.NEW
    bench.clock.now = 9.0
    bench.books.expire()
    assert ticket.state is State.FAILED and ticket.error is not None and ticket.error.kind == "timeout"


# --- the end


def test_a_worker_that_is_lost_while_the_connector_is_closed_is_not_started_again() -> None:
    stage, made = Stage(is_open=False), []

    def make() -> FakeEncoder:
        made.append(FakeEncoder(on_encode=stage))
        return made[-1]

    each = connector([make])
    each.submit(request("a"))
    stage.wait_for_batch()
    stage.faults["a"] = SystemExit
    closer = threading.Thread(target=each.close, daemon=True)
    closer.start()
    wait_until(lambda: each.workers()["worker 0"] == "draining")
    stage.open()
    closer.join(PATIENCE_S / 6)
    assert not closer.is_alive(), "it waits for a worker that nobody asked for"
    assert len(made) == 1
    assert_nothing_is_left(each)


def test_encoders_are_closed_when_another_cannot_be_made() -> None:
    first: Any = FakeEncoder()
    first.close = mock.Mock()
    with pytest.raises(RuntimeError, match="no device"):
        connector([lambda: first, mock.Mock(side_effect=RuntimeError("no device"))])
    first.close.assert_called_once_with()


def test_threads_of_workers_that_were_given_up_are_forgotten_once_they_end() -> None:
    seen: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
    with connector() as each:
        for _ in range(6):
            wait_until(lambda: each.workers()["worker 0"] == "running")
            seen.update(thread for thread in threading.enumerate() if thread.name == "connector-worker 0")
            wait_until(lambda: sum(thread.is_alive() for thread in seen) == 1)
            each.restart_worker("worker 0")
        gc.collect()
        assert len(seen) <= 2
