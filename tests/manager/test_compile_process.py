"""What the process that compiles for another one finds there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.manager import tower_pickle
from fxsplit_encoder.manager.compile_process import REQUEST, CompileRequest
from tests.towers.tiny_towers import TINY

_CHILD = """
import sys
from pathlib import Path
import torch
from fxsplit_encoder.manager.compile_process import load_request

request = load_request(Path(sys.argv[1]))
inputs = request.tower.prepare_encoder_cudagraph_capture_inputs(16, 4, 0, request.device, request.dtype)
print(tuple(request.tower.encoder_cudagraph_forward(inputs.values).shape))
"""


@pytest.mark.parametrize("name", ["Qwen3VLVisionModel", "InternVLModel"])
def test_a_tower_runs_where_nobody_wrapped_it(name: str, tmp_path: Path) -> None:
    """A tower of transformers asks by name for attention that is registered where one is wrapped."""
    tower = fx.wrap(TINY[name].make())
    nothing: Any = None
    request = CompileRequest(tower, nothing, torch.float32, nothing, torch.device("cpu"))
    (tmp_path / REQUEST).write_bytes(tower_pickle.dump(request))
    command = [sys.executable, "-c", _CHILD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    inputs = tower.prepare_encoder_cudagraph_capture_inputs(
        16, 4, 0, torch.device("cpu"), torch.float32
    ).values
    assert done.stdout.strip() == str(tuple(tower.encoder_cudagraph_forward(inputs).shape))
