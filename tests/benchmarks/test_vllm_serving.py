"""What is said of an engine that does not start."""

from __future__ import annotations

from cases.vllm_serving import root_cause

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
