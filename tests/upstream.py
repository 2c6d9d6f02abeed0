"""Runs transformers' own model tests plain and accelerated, and prints those that fail only accelerated.

`python -P tests/upstream.py CHECKOUT MODEL...`; further options are pytest's. Exits with 1 if there are any.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

VARIABLE = "ACCELERATED_WITH"
CONFIG = '{"mode": "full", "piece_compiler": "eager", "exact_min_hits": 1}'

models: list[Any] = []
served: Counter[str] = Counter()


def pytest_sessionstart() -> None:
    """Accelerates each model where its constructor ends: in training mode, before weights are loaded."""
    import transformers

    import fxsplit_encoder as fx

    own = transformers.PreTrainedModel.post_init

    def post_init(model: Any) -> None:
        own(model)
        try:
            models.append(fx.accelerate(model, json.loads(os.environ[VARIABLE])))
        except fx.UnsupportedTowerError:
            pass  # a language model

    if os.environ[VARIABLE]:
        transformers.PreTrainedModel.post_init = post_init


def pytest_runtest_setup() -> None:
    """Seeds every generator, so that a test has the same random numbers in both runs."""
    import numpy as np
    import torch

    common = sys.modules.get("tests.test_modeling_common")
    for generator in (random, getattr(common, "global_rng", random)):
        generator.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_runtest_teardown() -> None:
    """Counts the hits and misses of the test's models, and drops them."""
    from fxsplit_encoder.hugging_face import served_towers_of

    for tower in {id(tower): tower for model in models for _, tower in served_towers_of(model)}.values():
        served.update({"hits": tower.stats().hits, **tower.stats().misses})
    models.clear()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints what was served."""
    terminalreporter.write_line(", ".join(f"{why} {count}" for why, count in served.most_common()))


def passed(checkout: str, options: list[str], config: str) -> set[str]:
    """Runs tests in a process of their own, plain without a configuration; returns those that passed."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        command = [sys.executable, "-P", __file__, "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        subprocess.run([*command, *options], cwd=checkout, env=os.environ | {VARIABLE: config})
        cases = ElementTree.parse(report).iter("testcase")
    failing = {"failure", "error", "skipped"}
    return {f"{c.get('classname')}.{c.get('name')}" for c in cases if failing.isdisjoint(e.tag for e in c)}


def main(checkout: str, *arguments: str, config: str = CONFIG) -> int:
    """Runs the tests of the models twice. Arguments from the first dash on are pytest's."""
    split = next((i for i, each in enumerate(arguments) if each.startswith("-")), len(arguments))
    files = [f"tests/models/{model}/test_modeling_{model}.py" for model in arguments[:split]]
    plain, accelerated = (passed(checkout, [*files, *arguments[split:]], each) for each in ("", config))
    print(f"{len(plain)} passed plain, {len(plain & accelerated)} accelerated; only plain:")
    print(*sorted(plain - accelerated), sep="\n")
    return 1 if plain - accelerated else 0


if __name__ == "__main__":
    if VARIABLE in os.environ:
        sys.exit(pytest.main(sys.argv[1:], plugins=[sys.modules[__name__]]))
    sys.exit(main(*sys.argv[1:]))
