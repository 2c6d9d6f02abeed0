"""Kernels of layers with an activation compiled ahead: which, and by the process that does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxsplit_encoder._torch.tensors import FakeTensorMode
from fxsplit_encoder.kernels import compile_jobs
from fxsplit_encoder.kernels.choice import Chooser, KernelMeasurements
from fxsplit_encoder.kernels.meter import Measured
from fxsplit_encoder.kernels.products import measured
from fxsplit_encoder.kernels.products.measured import KERNELS, ProductMeter, ProductShape, linear

CUDA = torch.device("cuda", 0)
MODULE = "fxsplit_encoder.kernels.compile_jobs_process"
TILES = ["quack_128x160", "quack_128x192"]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str, torch.dtype]]:
    """What was begun on a device that has the kernels."""
    log: list[tuple[list[str], str, torch.dtype]] = []

    def start(names: Any, activation: str, dtype: torch.dtype, device: torch.device) -> None:
        assert device == CUDA
        if (job := ([*names], activation, dtype)) not in log:
            log.append(job)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(measured, "has_fused_activations", lambda capability: capability == (9, 0))
    monkeypatch.setattr(measured.compile_jobs, "start", start)
    monkeypatch.setattr(compile_jobs, "name_quack_directory", lambda: None)
    measurements = KernelMeasurements(ProductShape, KERNELS, ProductMeter())
    monkeypatch.setattr(measured, "CHOOSER", Chooser(measurements))
    return log


def layer(activation: str, *, bias: bool = True) -> fx.Node:
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    with FakeTensorMode():
        rows.meta["val"] = torch.empty(8, 16, dtype=torch.bfloat16)
    return graph.call_function(linear, (rows, rows, rows if bias else None, activation))


def test_each_activation_is_begun_once(begun: list[Any]) -> None:
    measured.compile_ahead([layer("gelu"), layer("gelu"), layer("swiglu")], CUDA)
    measured.compile_ahead([layer("swiglu", bias=False)], CUDA)
    measured.compile_ahead([layer("gelu")], torch.device("cpu"))
    assert begun == [(TILES, "gelu", torch.bfloat16), (TILES, "swiglu", torch.bfloat16)]


def test_nothing_is_begun_where_earlier_times_choose(begun: list[Any]) -> None:
    shape = ProductShape(CUDA, torch.bfloat16, 512, 16, 16, True, "gelu")
    measured.CHOOSER.measurements.add(CUDA, {shape: Measured({"cublas": 1.0})})
    measured.compile_ahead([layer("gelu"), layer("gelu_tanh")], CUDA)
    assert [activation for _, activation, _ in begun] == ["gelu_tanh"]


def test_a_call_waits_for_what_is_being_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def multiply(*given: Any, postact_out: Tensor, **options: Any) -> None:
        log.append(f"called for {options['activation']}")

    def found(module: str, name: str) -> tuple[Any, None]:
        return (multiply if name == "gemm_act" else dict), None

    monkeypatch.setattr(measured.compile_jobs, "wait", lambda: log.append("waited"))
    monkeypatch.setattr("fxsplit_encoder.kernels.kernel.find", found)
    monkeypatch.setattr(measured, "find", found)
    rows, weight = torch.randn(5, 16), torch.randn(8, 16)
    result = measured.Quack(160)(rows, weight, None, "swiglu")
    assert result.shape == (5, 4)
    assert log == ["waited", "called for swiglu"]


# --- with the packages, which need no GPU for it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "job"),
    [
        ("flash_attn", '["flash_attn_4_64x128", 72, "bfloat16"]'),
        ("quack", '["quack_128x192", "gelu", "bfloat16"]'),
    ],
)
def test_what_one_process_compiles_another_loads(package: str, job: str, tmp_path: Path) -> None:
    if any(importlib.util.find_spec(each) is None for each in (package, "cutlass", "triton")):
        pytest.skip(f"{package} is not installed")
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "FLASH_ATTENTION_ARCH": "sm_90",
        "CUTE_DSL_ARCH": "sm_90a",
        "QUACK_ARCH": "sm_90",
        "FLASH_ATTENTION_NUM_SMS": "132",
        compile_jobs.FLASH_SWITCH: "1",
        compile_jobs.FLASH_DIRECTORY: str(tmp_path),
        compile_jobs.QUACK_DIRECTORY: str(tmp_path),
    }
    never = f"import cutlass.cute, {MODULE} as m; cutlass.cute.compile = None; m.main([input()])"
    for command in (["-m", MODULE], ["-c", never]):
        subprocess.run([sys.executable, *command], env=environment, input=job, text=True, check=True)
        assert len([*tmp_path.rglob("*.o")]) == 1
