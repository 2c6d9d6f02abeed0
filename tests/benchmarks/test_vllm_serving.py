"""What is said of an engine that does not start."""

from __future__ import annotations

from cases.vllm_serving import plugin_problem, root_cause

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
