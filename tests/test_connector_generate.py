"""The engine in examples/ says what `model.generate` says, whatever happens on the way."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import connector_generate as example
import pytest

from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.errors import ConnectorError

pytestmark = pytest.mark.slow

TOKENS = 6
PROMPT = ["Look: ", example.IMAGES / "rocket.jpg", " and ", example.IMAGES / "cat.jpg", ". Well?"]


@pytest.fixture(scope="module")
def model() -> Any:
    return example.tiny_model()


@pytest.fixture(scope="module")
def alone(model: Any) -> Any:
    """An equal model that nobody wraps."""
    return copy.deepcopy(model)


@pytest.fixture(scope="module")
def connector(model: Any, alone: Any) -> Iterator[Connector]:
    with example.make_connector(model, example.image_processor()) as made:
        yield made


def expected(alone: Any, prompt: list[Any]) -> list[int]:
    return example.expected_tokens(alone, example.image_processor(), prompt, TOKENS)


def test_the_example_says_what_generate_says(
    connector: Connector, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example, "make_connector", lambda *_: contextlib.nullcontext(connector))
    assert example.main(["--tokens", str(TOKENS)]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" as model.generate says") == len(example.REQUESTS)
    assert connector.stats().misses == 3  # pictures, of five that the requests show
    assert connector.audit() == []


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_and_preemption_change_nothing(
    connector: Connector, model: Any, alone: Any, chunk: int
) -> None:
    engine = example.Engine(model, connector, chunk)
    generation = engine.submit("r", PROMPT, TOKENS)
    beside = engine.submit("text", ["Once"], TOKENS)
    steps = preemptions = 0
    while not (generation.is_done and beside.is_done):
        steps += 1
        assert steps < 1000
        if not engine.step():
            generation.ticket.wait(60)
            continue
        is_due = chunk == 1 or generation.computed >= generation.prompt_length
        if preemptions < 2 and generation.computed > 5 and is_due:
            preemptions += 1  # in the middle of the prefill, or after it
            engine.preempt(generation)
    assert preemptions == 2
    assert generation.generated == expected(alone, PROMPT)
    assert beside.generated == expected(alone, ["Once"])
    assert connector.audit() == []


def test_what_is_said_depends_on_every_image(alone: Any) -> None:
    other = [example.IMAGES / "coffee.jpg" if part == PROMPT[3] else part for part in PROMPT]
    assert len({tuple(expected(alone, prompt)) for prompt in (PROMPT, other, [PROMPT[0]])}) == 3


def test_an_image_that_cannot_be_read_fails_alone(
    connector: Connector, model: Any, alone: Any, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_bytes((example.IMAGES / "cat.jpg").read_bytes()[:2000])
    engine = example.Engine(model, connector, 16)
    engine.submit("broken", ["What? ", broken], TOKENS)
    generation = engine.submit("r", PROMPT, TOKENS)
    engine.run()
    assert isinstance(engine.failed["broken"], ConnectorError)
    assert generation.generated == expected(alone, PROMPT)
