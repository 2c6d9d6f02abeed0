"""What processes without a device compile of FlashAttention 4 is what this device loads and runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fxsplit_encoder.kernels import compile_jobs
from fxsplit_encoder.kernels.attention import KERNELS

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SCRIPT = """
import time, sys
from pathlib import Path
import torch
from fxsplit_encoder.kernels import compile_jobs
from fxsplit_encoder.kernels.attention import KERNELS
from fxsplit_encoder.kernels.attention.builtin import PerSegment

names, device = ["flash_attn_4", "flash_attn_4_64x128", "flash_attn_4_dense"], torch.device("cuda", 0)
begin = time.perf_counter()
compile_jobs.warm_up(3, device)
compile_jobs.start(names, 72, torch.bfloat16, device)
compile_jobs.wait()
print("compiled ahead in", time.perf_counter() - begin)
import cutlass.cute as cute
cute.compile = None  # nothing is left to compile
for rows in (512, 32):  # the second fits into one tile
    query, key, value = torch.randn(rows, 3, 16, 72, device=device).bfloat16().unbind(1)
    lengths = torch.tensor([0, rows], dtype=torch.int32, device=device)
    expected = PerSegment()(query.float(), key.float(), value.float(), lengths, rows, 72**-0.5)
    for kernel in KERNELS:
        if kernel.name in names:
            begin = time.perf_counter()
            found = kernel(query, key, value, lengths, rows, 72**-0.5)
            torch.cuda.synchronize()
            print(kernel.name, rows, "rows, first call", time.perf_counter() - begin)
            torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.02)
"""


def test_what_is_compiled_ahead_is_loaded_and_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    kernel = next(each for each in KERNELS if each.name == "flash_attn_4")
    if (reason := kernel.unavailable_reason(device)) is not None:
        pytest.skip(reason)
    monkeypatch.setenv(compile_jobs.FLASH_SWITCH, "1")
    if not compile_jobs.is_possible(device):
        pytest.skip("nothing is compiled ahead here")
    environment = {**os.environ, "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, text=True, stdout=subprocess.PIPE, check=True
    )
    print(ran.stdout)
    assert len([*tmp_path.rglob("*.o")]) == 3
