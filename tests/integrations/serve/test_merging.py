"""One thread encodes; what waits for it goes together, and an error to those alone who caused it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError

import numpy as np
import pytest

from fxsplit_encoder.integrations.images import PreparedImage, Result
from fxsplit_encoder.integrations.serve.encoder import Fetch, MergingThread


def image(number: int) -> PreparedImage:
    return PreparedImage({"number": np.array([number])}, {})


def number_of(image: PreparedImage) -> int:
    return int(image.inputs["number"][0])


class Encoder:
    """Encodes a number as itself, and waits where it is told to."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def launch(self, images: Sequence[PreparedImage]) -> Fetch:
        self.threads.add(threading.current_thread().name)
        numbers = [number_of(image) for image in images]
        self.batches.append(numbers)
        self.entered.set()
        self.gate.wait()
        if -1 in numbers:
            raise RuntimeError("of the test")

        def fetch() -> list[Result]:
            if -2 in numbers:
                raise RuntimeError("later")
            return [np.array([n]) for n in numbers]

        return fetch


def held(encoder: Encoder, max_weight: int = 10) -> tuple[MergingThread, Callable[[], None]]:
    """A thread that is busy with a first call, and what lets it go on."""
    thread = MergingThread(lambda: encoder.launch, lambda: max_weight)
    encoder.gate.clear()
    thread.submit([image(100)], 1)
    encoder.entered.wait()
    return thread, encoder.gate.set


def test_calls_that_wait_are_encoded_together_up_to_the_limit() -> None:
    encoder = Encoder()
    thread, go_on = held(encoder)
    calls = [thread.submit([image(n), image(n + 1)], 4) for n in (0, 2, 4, 6)]
    large = thread.submit([image(8)], 99)
    last = thread.submit([image(9)], 1)
    go_on()
    results = [[int(r[0]) for r in call.result()] for call in (*calls, large, last)]
    assert results == [[0, 1], [2, 3], [4, 5], [6, 7], [8], [9]]
    assert encoder.batches == [[100], [0, 1, 2, 3], [4, 5, 6, 7], [8], [9]]
    assert len(encoder.threads) == 1
    thread.close()
    assert not thread.is_alive


def test_a_call_that_was_cancelled_is_left_out() -> None:
    encoder = Encoder()
    thread, go_on = held(encoder)
    calls = [thread.submit([image(n)], 1) for n in range(3)]
    assert calls[1].cancel()
    go_on()
    assert [int(calls[n].result()[0][0]) for n in (0, 2)] == [0, 2]
    with pytest.raises(CancelledError):
        calls[1].result()
    assert encoder.batches[1] == [0, 2]
    thread.close()


def test_who_caused_an_error_is_the_only_one_who_gets_it() -> None:
    encoder, failures = Encoder(), []
    thread = MergingThread(lambda: encoder.launch, lambda: 10, failures.append)
    encoder.gate.clear()
    thread.submit([image(100)], 1)
    encoder.entered.wait()
    calls = [thread.submit([image(n)], 1) for n in (0, -1, 2)]
    encoder.gate.set()
    assert [int(calls[n].result()[0][0]) for n in (0, 2)] == [0, 2]
    with pytest.raises(RuntimeError, match="of the test"):
        calls[1].result()
    with pytest.raises(RuntimeError, match="later"):
        thread.submit([image(-2)], 1).result()
    assert [str(error) for error in failures] == ["of the test", "later"]
    assert int(thread.submit([image(3)], 1).result()[0][0]) == 3
    thread.close()


def test_an_encoder_that_cannot_start_says_so() -> None:
    def start() -> Callable[[Sequence[PreparedImage]], Fetch]:
        raise ValueError("no checkpoint")

    with pytest.raises(ValueError, match="no checkpoint"):
        MergingThread(start, lambda: 10)


def test_what_was_submitted_before_the_end_is_done() -> None:
    encoder = Encoder()
    thread, go_on = held(encoder)
    calls = [thread.submit([image(n)], 6) for n in range(4)]
    closing = threading.Thread(target=thread.close)
    closing.start()
    go_on()
    closing.join()
    assert [int(call.result()[0][0]) for call in calls] == [0, 1, 2, 3]
