"""`python -m tests_vllm.encoder_cache MODEL DIRECTORY ROLE [READY]`: an engine with our EC connector.

Prints a line of JSON: the tokens that it generates and the images that it encodes. A producer creates READY
when it has encoded them, and ends when READY is gone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests_vllm import conftest  # noqa: F401
from tests_vllm.generate import prompts
from tests_vllm.padded_attention import use_padded_attention

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
_SECONDS = 300


def make_engine(model: str, directory: str, role: str) -> Any:
    """An engine of this role; "alone" for one without a connector."""
    import torch
    from vllm import LLM

    use_padded_attention()
    torch.cuda.is_current_stream_capturing = lambda: False
    transfer = {
        "ec_connector": "FxsplitECConnector",
        "ec_connector_module_path": "fxsplit_encoder.integrations.vllm.ec_connector",
        "ec_role": role,
        "ec_connector_extra_config": {"directory": directory, "max_bytes": "64MiB"},
    }
    return LLM(
        model,
        dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=256,
        enforce_eager=True,
        limit_mm_per_prompt={"image": 2, "video": 0},
        kv_cache_memory_bytes=1 << 26,
        enable_prefix_caching=False,
        mm_processor_cache_gb=0,
        ec_transfer_config=None if role == "alone" else transfer,
    )


def main(model: str, directory: str, role: str, ready: str = "") -> None:
    """Answers the requests of `generate`, and counts what is encoded for them."""
    from vllm import SamplingParams

    llm = make_engine(model, directory, role)
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    encoded = []
    embed = runner.model.embed_multimodal

    def counted(**kwargs: Any) -> Any:
        outputs = embed(**kwargs)
        encoded.append(len(outputs))
        return outputs

    runner.model.embed_multimodal = counted
    producer = role == "ec_producer"
    sampling = SamplingParams(temperature=0.0, max_tokens=1 if producer else 16, ignore_eos=True)
    answers = llm.generate(prompts(0), sampling)
    result: dict[str, Any] = {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "encoded": sum(encoded),
    }
    connector = core.scheduler.ec_connector
    if connector is not None and connector._found is not None:
        result |= {"counts": connector._found.counts, "held": connector._found.num_held}
    print(json.dumps(result), flush=True)
    if ready:
        Path(ready).touch()
        deadline = time.monotonic() + _SECONDS
        while Path(ready).exists() and time.monotonic() < deadline:
            time.sleep(0.1)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
