"""Where `invariant` is set one kernel attends everywhere, chosen by what it is."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.kernels import kernel as kernels_base
from fxsplit_encoder.kernels.attention import KERNELS, AttentionShape, KernelChooser, KnownSegments
from fxsplit_encoder.kernels.attention.chooser import Measurements, invariant_kernel, invariant_names
from fxsplit_encoder.kernels.attention.op import attend
from fxsplit_encoder.kernels.choice import choosing, measuring
from fxsplit_encoder.planning.plan import InvariantPolicy

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = AttentionShape(CUDA, torch.bfloat16, 16, 72, 3136, 3136, 1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Devices of a compute capability on which some packages are installed."""

    def install(major: int, *packages: str) -> None:
        def find(module: str, attribute: str) -> tuple[Any, str | None]:
            return None, None if module.startswith(packages) else f"cannot import {module}"

        monkeypatch.setattr(kernels_base, "find", find)
        for name in ("kernel", "attention.flash_attn"):
            monkeypatch.setattr(f"fxsplit_encoder.kernels.{name}.capability", lambda _: (major, 0))

    return install


def test_the_order_of_kernels_and_the_device_decide(gpu: Any) -> None:
    gpu(9, "flash_attn.cute", "fxsplit_encoder")
    assert invariant_kernel(KERNELS, SHAPE).name == "flash_attn_4"
    assert invariant_names(KERNELS, CUDA) == ["flash_attn_4", "torch_flash", "triton_64x64"]
    assert invariant_kernel(KERNELS, SHAPE, "triton_64x64").name == "triton_64x64"
    gpu(9)
    assert invariant_kernel(KERNELS, SHAPE).name == "torch_flash"
    gpu(10, "flash_attn.cute")
    assert invariant_kernel(KERNELS, SHAPE).name == "torch_flash"
    with pytest.raises(
        ConfigError, match="flash_attn_4: on this device its algorithm depends on the longest"
    ):
        invariant_kernel(KERNELS, SHAPE, "flash_attn_4")


def test_all_calls_with_the_same_heads_get_the_same_kernel(gpu: Any) -> None:
    gpu(9)
    chooser = KernelChooser(measurements=Measurements(), policy=InvariantPolicy(True))
    for tokens, segments, known, equal in itertools.product(
        (1, 700, 9999), (1, 40), (False, True), (False, True)
    ):
        shape = replace(SHAPE, tokens=tokens, segments=segments, host_lengths=known, equal=equal)
        assert [kernel.name for kernel in chooser.ranking(shape)] == ["torch_flash"]
    assert chooser.chosen == ["16x72 bfloat16: torch_flash"]


def test_heads_that_no_such_kernel_computes_are_refused(gpu: Any) -> None:
    gpu(9)
    with pytest.raises(
        ConfigError, match=r"no kernel attends to 16 heads of 72 in float32 on cuda:0 .*allowed: "
    ):
        invariant_kernel(KERNELS, replace(SHAPE, dtype=torch.float32))


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_a_segment_has_the_bits_that_it_gets_alone(
    lengths: list[int], dtype: torch.dtype, known: bool
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = sum(lengths)
    q, k, v = torch.randn(tokens, 3, 2, 20, generator=generator).to(dtype).unbind(1)
    boundaries = [0, *itertools.accumulate(lengths)]
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
    with choosing(KernelChooser(policy=InvariantPolicy(True))), measuring():
        if known:
            together = KnownSegments(cu_seqlens, boundaries).attend(q, k, v, 0.3)
        else:
            together = attend(q, k, v, cu_seqlens, tokens, 0.3)
        for start, end in itertools.pairwise(boundaries):
            alone = torch.tensor([0, end - start], dtype=torch.int32)
            own = (each[start:end].clone() for each in (q, k, v))
            if end > start:
                assert torch.equal(attend(*own, alone, end - start, 0.3), together[start:end])
