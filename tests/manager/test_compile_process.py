"""What the process that compiles for another one finds there."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.attention import KernelChooser
from fxsplit_encoder.attention.choice import Measurements
from fxsplit_encoder.attention.kernels import AttentionShape
from fxsplit_encoder.attention.measure import AttentionMeter
from fxsplit_encoder.kernels import MeasurementCache, measuring
from fxsplit_encoder.manager.compile_process import REQUEST, CompileRequest, build_kernels, dump_tower
from fxsplit_encoder.runtime import Choosers
from tests.attention.fakes import FakeKernel
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


@pytest.mark.parametrize(
    "name", ["Qwen3VLVisionModel", pytest.param("InternVLModel", marks=pytest.mark.exhaustive)]
)
def test_a_tower_runs_where_nobody_wrapped_it(name: str, tmp_path: Path) -> None:
    """A tower of transformers asks by name for attention that is registered where one is wrapped."""
    tower = fx.wrap(TINY[name].make())
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


CPU = torch.device("cpu")
CAPTURED = AttentionShape(CPU, torch.bfloat16, 2, 8, 48, 24, 4)


class Everywhere(AttentionMeter):
    def can_measure(self, device: torch.device) -> bool:
        return True


class Scene:
    """A generation whose captures meet one class of calls, and two kernels that note what is built."""

    def __init__(self, directory: Path, *, is_cuda: bool = True) -> None:
        self.built: list[str] = []
        names = ["one", "two"]

        def kernel(name: str) -> FakeKernel:
            def note(out: torch.Tensor) -> torch.Tensor:
                self.built.append(name)
                return out

            return FakeKernel(name, change=note)

        measurements = Measurements(
            [kernel(name) for name in names],
            Everywhere(lambda call, shape: 7.0),
            lambda device: MeasurementCache({}, AttentionShape, names, directory),
        )
        self.choosers: Any = Choosers(attention=KernelChooser(measurements=measurements))
        self.generation: Any = types.SimpleNamespace(
            pool=types.SimpleNamespace(device=CPU),
            scope=types.SimpleNamespace(measured=is_cuda),
            planned_captures=lambda: "planned",
            runs=self.runs,
        )

    def runs(self, planned: str) -> Iterator[None]:
        assert planned == "planned"
        self.choosers.attention.ranking(CAPTURED)
        yield


def test_kernels_are_built_and_no_time_is_kept_that_was_found_beside_requests(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert build_kernels(scene.generation, scene.choosers) == ""
    assert set(scene.built) == {"one", "two"}
    assert not list(tmp_path.iterdir())


def test_what_was_compared_before_is_not_built_again(tmp_path: Path) -> None:
    before = Scene(tmp_path)
    with measuring():
        before.choosers.attention.ranking(CAPTURED)
    assert before.built and list(tmp_path.iterdir())
    scene = Scene(tmp_path)
    assert build_kernels(scene.generation, scene.choosers) == ""
    assert not scene.built


def test_on_a_cpu_there_is_nothing_to_compare(tmp_path: Path) -> None:
    scene = Scene(tmp_path, is_cuda=False)
    assert build_kernels(scene.generation, scene.choosers) == ""
    assert not scene.built


def test_a_run_that_fails_is_told(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.generation.planned_captures = lambda: "unplanned"
    assert build_kernels(scene.generation, scene.choosers).startswith("AssertionError")
