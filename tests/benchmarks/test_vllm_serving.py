"""What is said of an engine that does not start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cases.vllm_serving import AT_ONCE, _row, order_of_start, plugin_problem, root_cause, use_one_node

LOG = """(EngineCore pid=7) ERROR 11-24 14:49:52 [core.py:1454] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-24 14:49:52 [core.py:1454] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-24 14:49:52 [core.py:1454]   File "sampler.py", line 3, in <module>
(EngineCore pid=7) ERROR 11-24 14:49:52 [core.py:1454] ModuleNotFoundError: No module named 'flashinfer'
(EngineCore pid=7) Process EngineCore:
Traceback (most recent call last):
  File "async_llm.py", line 9, in start
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_the_first_error_of_any_process_is_the_reason() -> None:
    assert root_cause(LOG) == "ModuleNotFoundError: No module named 'flashinfer'"
    assert root_cause("INFO all is well\n") is None


def test_an_engine_whose_encoder_is_not_the_plugins_is_no_measurement_of_it() -> None:
    serves = "INFO 11-24 [adapter.py:9] encoder CUDA graphs by fxsplit_encoder (...): compile=False\n"
    assert plugin_problem(serves) is None
    left = "vLLM's own manager captures the encoder, since fxsplit_encoder could not: CaptureError: no"
    assert plugin_problem(f"{serves}WARNING 11-24 {left}\n") == left
    assert plugin_problem("INFO all is well\n") == "the plugin made no manager"


def test_every_engine_runs_on_the_node_with_most_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 4, 5, 6})
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: kept.append(cores))
    use_one_node(tmp_path)  # a host that does not say
    for number, cores in enumerate(("0-3\n", "4-6,9\n")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores, encoding="utf-8")
    use_one_node(tmp_path)
    assert kept == [{4, 5, 6}]


def test_rounds_are_told_as_one_row() -> None:
    rounds = [
        {"answers": [[1, 2], [3, 4]], "first": [10.0, 30.0], "seconds": 0.5},
        {"answers": [[5, 6], [7, 8]], "first": [20.0, 40.0], "seconds": 1.5},
    ]
    rounds[0] |= {"encoder host": [1.0], "in engine": [4.0]}
    rounds[1] |= {"encoder host": [3.0, 2.0], "in engine": [8.0]}
    rounds = [{**each, "turn": turn, "engine": 0} for turn, each in enumerate(rounds)]
    row = _row("ours", "4 images", rounds, {0: [[1, 2], [3, 4]], 1: [[5, 6], [7, 9]]})
    told = {
        **dict(variant="ours", requests="4 images", count=4, rate=5.0, same=0.75, p50=20.0, p99=40.0),
        "encoder host": 2.0,
        "in engine": 4.0,
    }
    assert row == told
    expected = {each["turn"]: each["answers"] for each in rounds}
    assert _row("ours", AT_ONCE, rounds, expected)["requests per second"] == 2.0
    rounds[1]["engine"] = 1
    assert _row("ours", "4 images", rounds, expected) == {**told, "same": 1.0, "p50 by engine": [10.0, 20.0]}


def test_no_variant_is_always_the_first_to_start() -> None:
    started = [engine.name for engine in order_of_start(["vllm", "ours"], 3)]
    assert started == ["vllm-0", "ours-0", "ours-1", "vllm-1", "vllm-2", "ours-2"]
