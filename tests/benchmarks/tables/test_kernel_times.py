from __future__ import annotations

from typing import Any

import pytest
from tables.kernel_times import (
    ATTENTION,
    COPIES,
    OTHER,
    POINTWISE,
    PRODUCTS,
    kind_of,
    marked_kinds,
    marked_largest,
)

from ..conftest import ENVIRONMENT
from .cells import cells

FLASH_2 = "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<96, 64, 64, 4, false>>"
FLASH_4 = "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at_"
COPY = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>>"
)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_128x152_64x6_2x1_v_bz_coopA_bias_TNN", PRODUCTS),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize2x1x1", PRODUCTS),
        (
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_64x2>",
            PRODUCTS,
        ),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", PRODUCTS),
        ("triton_tem_fused_addmm_2", PRODUCTS),
        ("triton_per_fused_add_addmm_gelu_native_layer_norm_varlen_attention_3", POINTWISE),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>", POINTWISE),
        (FLASH_2, ATTENTION),
        (FLASH_4, ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1", ATTENTION),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", ATTENTION),
        ("Memcpy DtoD (Device -> Device)", COPIES),
        ("Memset (Device)", COPIES),
        (COPY, COPIES),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>", COPIES),
        (
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy<Opaque, unsigned int, 2>",
            COPIES,
        ),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", OTHER),
    ],
)
def test_a_kernel_is_known_by_its_name(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def row(patches: int, replay: float, **microseconds: float) -> dict[str, Any]:
    kernels = [{"kernel": name, "calls": 27.0, "us": us} for name, us in microseconds.items()]
    return {"patches": patches, "replay us": replay, "kernels": kernels}


def test_what_kernels_leave_of_a_replay_are_gaps() -> None:
    rows = [row(196, 100.0, nvjet_a=40.0, nvjet_b=20.0, triton_per_fused=20.0), row(784, 200.0, flash=150.0)]
    text = marked_kinds({**ENVIRONMENT, "tower": "Qwen3-VL", "rows": rows})
    header, *lines = cells(text)
    assert header == ["kind", "196 patches", "784 patches"]
    by_kind = {line[0]: line[1:] for line in lines}
    assert by_kind[PRODUCTS] == ["60 (60%)", "0 (0%)"]
    assert by_kind[ATTENTION] == ["0 (0%)", "150 (75%)"]
    assert by_kind["gaps"] == ["20 (20%)", "50 (25%)"]
    assert by_kind["replay"] == ["100 (100%)", "200 (100%)"]
    assert "Qwen3-VL, torch 2.11" in text


def test_the_ten_largest_kernels_of_a_size_are_listed() -> None:
    names = {f"triton_poi_{i}": float(i) for i in range(12)}
    rows = [row(196, 200.0, **names), row(784, 400.0, **{FLASH_2: 100.0})]
    _, *lines = cells(marked_largest({"rows": rows}))
    assert [line[1] for line in lines[:-1]] == [f"`triton_poi_{i}`" for i in range(11, 1, -1)]
    assert lines[0] == ["196", "`triton_poi_11`", POINTWISE, "27.0", "11.0", "5.5%"]
    size, name, *_, share = lines[-1]
    assert (size, share) == ("784", "25.0%")
    assert name.startswith("`pytorch_flash::flash_fwd_kernel<") and name.endswith("...`") and len(name) == 74
