"""What the process that compiles for another one finds there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.manager.compile_process import (
    REQUEST,
    CompileRequest,
    dump_tower,
    load_tower,
)
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


def test_a_tower_runs_where_nobody_wrapped_it(tmp_path: Path) -> None:
    """A tower of transformers asks by name for attention that is registered where one is wrapped."""
    tower = fx.wrap(TINY["Qwen3VLVisionModel"].make())
    nothing: Any = None
    request = CompileRequest(tower, nothing, torch.float32, nothing, torch.device("cpu"))
    (tmp_path / REQUEST).write_bytes(dump_tower(request))
    command = [sys.executable, "-c", _CHILD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    inputs = tower.prepare_encoder_cudagraph_capture_inputs(
        16, 4, 0, torch.device("cpu"), torch.float32
    ).values
    assert done.stdout.strip() == str(tuple(tower.encoder_cudagraph_forward(inputs).shape))


def described(module: nn.Module) -> Any:
    """The classes of its modules, and what its tensors look like."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return (
        [(name, type(each)) for name, each in module.named_modules()],
        [(name, each.shape, each.stride(), each.dtype) for name, each in tensors],
    )


@pytest.mark.parametrize("name", TINY)
def test_every_tower_can_be_sent(name: str) -> None:
    tower = fx.wrap(TINY[name].make())
    made = load_tower(dump_tower(tower))
    assert described(made) == described(tower)
    weights = {name: tensor for name, tensor in made.named_parameters() if tensor.nbytes > 4096}
    assert not any(tensor.any() for tensor in weights.values())


def test_what_tensors_look_like_stays_and_small_values_too() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(64, 64).t(), requires_grad=False)
    module.tied = module.weight
    module.register_buffer("table", torch.arange(6).view(2, 3))
    made = load_tower(dump_tower(module))
    assert made.weight is made.tied and isinstance(made.weight, nn.Parameter)
    assert made.weight.stride() == (1, 64) and not made.weight.requires_grad and not made.weight.any()
    torch.testing.assert_close(made.table, module.table)


class Subclass(torch.Tensor):
    pass


def test_what_cannot_be_sent_is_said() -> None:
    for value, why in (
        (torch.ones(2).as_subclass(Subclass), "it holds a Subclass"),
        (torch.ones(2, 2).to_sparse(), "it holds a tensor of layout torch.sparse_coo"),
        (lambda: None, "it cannot be pickled"),
    ):
        with pytest.raises(InputError, match=why):
            dump_tower([value])
    own = type("Own", (), {"__module__": "__main__"})
    with pytest.raises(InputError, match="Own is defined in the script that was started"):
        dump_tower(own)
