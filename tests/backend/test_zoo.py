"""Whatever a module makes of its tokens, the backend gives eager's results.

`pytest tests/backend/test_zoo.py -k less_the_mean` runs one; `ZOO_RUNS=20` draws so many cases of each.
"""

from __future__ import annotations

import os
import re

import pytest
import torch

from .zoo import ZOO, Entry, Run, draw

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

NUM_RUNS = int(os.environ.get("ZOO_RUNS", "1"))
CASES = [
    pytest.param(
        name, entry, id=re.sub(r"\W+", "_", name), marks=pytest.mark.exhaustive if number % 4 else ()
    )
    for number, (name, entry) in enumerate(ZOO.items())
]
"""With identifiers that `-k` takes; all but one of four are those of `make test-all`."""


@pytest.mark.parametrize(("name", "entry"), CASES)
def test_whatever_a_module_makes_of_its_tokens_are_eagers_results(name: str, entry: Entry) -> None:
    for number in range(max(NUM_RUNS, entry.runs)):
        torch._dynamo.reset()
        run = Run(entry, draw(name, entry, number))
        try:
            run.check()
        except (torch._dynamo.exc.TorchRuntimeError, NotImplementedError) as error:
            # This version of torch cannot trace or compute the module at all.
            pytest.skip(f"torch {torch.__version__}: {str(error).splitlines()[0]}")
        except AssertionError as error:
            error.add_note(str(run.case))
            raise
        assert run.num_compared >= 2, f"{name}: eager refuses nearly all of {run.case.counts}"
