"""Runs transformers' own model tests plain and accelerated, and shows those that fail only accelerated.

`python -P tests/upstream.py CHECKOUT MODEL...`; further options are pytest's. Exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

CONFIG = '{"mode": "full", "piece_compiler": "eager", "exact_min_hits": 1}'
WORSE = ("skipped", "passed", "failed")


class Plugin:
    """Keeps the outcome of each test; if there is a configuration, accelerates every model constructed."""

    def __init__(self, config: str | None) -> None:
        self.outcomes: dict[str, str] = {}
        self.served: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._models: list[Any] = []
        self._config = config

    def pytest_sessionstart(self) -> None:
        """Has `accelerate` called where a constructor ends: in training mode, before weights are loaded."""
        import transformers

        import fxsplit_encoder as fx

        config = None if self._config is None else json.loads(self._config)
        self._own = own = transformers.PreTrainedModel.post_init

        def post_init(model: Any) -> None:
            own(model)
            try:
                self._models.append(fx.accelerate(model, config))
            except fx.UnsupportedTowerError:
                pass  # a language model

        if config is not None:
            transformers.PreTrainedModel.post_init = post_init

    def pytest_sessionfinish(self) -> None:
        """Puts the constructor's end back."""
        import transformers

        transformers.PreTrainedModel.post_init = self._own

    def pytest_runtest_setup(self) -> None:
        """Gives a test the same random numbers in both runs."""
        import numpy as np
        import torch

        common = sys.modules.get("tests.test_modeling_common")
        for generator in (random, getattr(common, "global_rng", random)):
            generator.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Counts what the towers of the test's models served."""
        from fxsplit_encoder.integrations.hugging_face import served_towers_of

        towers = {id(tower): tower for model in self._models for _, tower in served_towers_of(model)}
        for stats in (tower.stats() for tower in towers.values()):
            counts = {"hits": stats.hits, **stats.misses}
            self.served[item.nodeid.partition("::")[0]].update(counts)
        self._models.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the worst outcome of a test, which has a report for each of its parts."""
        if report.when == "call" or report.failed:
            kept = self.outcomes.get(report.nodeid, "skipped")
            self.outcomes[report.nodeid] = max(kept, report.outcome, key=WORSE.index)

    def passed(self) -> set[str]:
        """The tests that passed."""
        return {name for name, outcome in self.outcomes.items() if outcome == "passed"}


def run(arguments: list[str], config: str | None) -> tuple[set[str], dict[str, Counter[str]]]:
    """Runs tests in this process, plain if there is no configuration: those that passed, and what each
    file's towers served.
    """
    plugin = Plugin(config)
    pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[plugin])
    return plugin.passed(), dict(plugin.served)


def table(plain: set[str], accelerated: set[str], served: dict[str, Counter[str]]) -> str:
    """A row of counts for each file, and the tests that fail only accelerated."""
    rows = ["| tests | passed plain | passed accelerated | failed only accelerated | served |"]
    rows.append("|---|---|---|---|---|")
    for file in sorted({name.partition("::")[0] for name in plain}):
        own = {name for name in plain if name.startswith(file)}
        counts = ", ".join(f"{why} {count}" for why, count in served.get(file, Counter()).most_common())
        rows.append(
            f"| {file} | {len(own)} | {len(own & accelerated)} | {len(own - accelerated)} | {counts} |"
        )
    return "\n".join([*rows, "", *sorted(plain - accelerated)])


def main() -> int:
    """Runs the tests twice, each time in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", help="of transformers, with the tests of the installed version")
    parser.add_argument("models", nargs="+", help="directories of its tests/models")
    parser.add_argument(
        "--plain", type=Path, help="a file that keeps which tests pass plain, for runs with the same options"
    )
    parser.add_argument(
        "--config", default=CONFIG, help="of accelerate; a breakable mode is faster, it traces nothing"
    )
    arguments, options = parser.parse_known_args()
    kept = None if arguments.plain is None else arguments.plain.resolve()
    os.chdir(arguments.checkout)
    options += [f"tests/models/{model}/test_modeling_{model}.py" for model in arguments.models]
    if kept is not None and kept.exists():
        plain = set(json.loads(kept.read_text()))
    else:
        plain, _ = _alone(options, None)
        if kept is not None:
            kept.write_text(json.dumps(sorted(plain)))
    accelerated, served = _alone(options, arguments.config)
    print(table(plain, accelerated, served))
    return 1 if plain - accelerated else 0


def _alone(options: list[str], config: str | None) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, options, config).result()


if __name__ == "__main__":
    sys.exit(main())
