"""Whatever a module makes of its tokens, the backend gives eager's results.

`pytest tests/backend/test_zoo.py -k less_the_mean` runs one; `ZOO_RUNS=20` draws so many cases of each.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from .zoo import INDEPENDENT, MIXING, Entry, Run, draw

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

NUM_RUNS = int(os.environ.get("ZOO_RUNS", "1"))


def each_of(zoo: dict[str, Entry], one_of: int) -> Any:
    """A test's parameters, with identifiers that `-k` takes; but for one of so many, `make test-all` has
    them."""
    cases = [
        pytest.param(
            name, entry, id=re.sub(r"\W+", "_", name), marks=pytest.mark.exhaustive if number % one_of else ()
        )
        for number, (name, entry) in enumerate(zoo.items())
    ]
    return pytest.mark.parametrize(("name", "entry"), cases)


def run_of(name: str, entry: Entry, number: int, **options: Any) -> Run:
    """A run that gave eager's results; skips the test where this version of torch cannot trace or compute
    the module at all.
    """
    torch._dynamo.reset()
    run = Run(entry, draw(name, entry, number, **options))
    try:
        run.check()
    except (torch._dynamo.exc.TorchRuntimeError, NotImplementedError) as error:
        pytest.skip(f"torch {torch.__version__}: {str(error).splitlines()[0]}")
    except AssertionError as error:
        error.add_note(str(run.case))
        raise
    return run


@each_of(MIXING, one_of=4)
def test_whatever_mixes_tokens_gives_eagers_results(name: str, entry: Entry) -> None:
    for number in range(max(NUM_RUNS, entry.runs)):
        run = run_of(name, entry, number)
        assert run.num_compared >= 2, f"{name}: eager refuses nearly all of {run.case.counts}"


@each_of(INDEPENDENT, one_of=2)
def test_independent_tokens_are_served_by_padded_replays(name: str, entry: Entry) -> None:
    for number in range(NUM_RUNS):
        run = run_of(name, entry, number, captured=True)
        reports = [str(d.program.padding) for d in run.made]
        assert sum(d.hits for d in run.made) > 0, f"{name}: never padded: {reports}\n{run.case}"
