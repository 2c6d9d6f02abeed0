"""vLLM's tensor parallelism: each rank with a whole encoder, and ranks that share its weights."""

from __future__ import annotations

import json
import subprocess
import sys


def test_ranks_share_the_images_and_weights_are_left_to_vllm() -> None:
    command = [sys.executable, "-m", "tests.vllm.ranks"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr[-4000:]
    first, second = json.loads(ran.stdout.strip().splitlines()[-1])
    assert first["weights"] is second["weights"] is None
    assert first["data"]["difference"] == second["data"]["difference"] == 0
    hits = [rank["data"]["hits"] for rank in (first, second)]
    assert sum(hits) == 5
    assert min(hits) > 0
