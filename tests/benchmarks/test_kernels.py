"""How kernels are told apart and added up."""

from __future__ import annotations

import pytest
from cases.kernels import Kernel, kind_of, shares


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "products"),
        ("void cutlass::device_kernel<GemmUniversal>(Params)", "products"),
        ("void splitKreduce_kernel<32, 16>(float)", "products"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("_attend_tile", "attention"),
        ("triton_red_fused_native_layer_norm_3", "norms and pointwise"),
        ("triton_poi_fused_addmm_convolution_gelu_5", "norms and pointwise"),
        ("triton_tem_fused_addmm_7", "products"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("Memset (Device)", "copies"),
    ],
)
def test_a_kernel_is_known_by_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_kernels_side_by_side_are_no_gap() -> None:
    run = [
        Kernel("void gemm<1>(float)", 1000.0, 4000.0),
        Kernel("triton_norm", 2000.0, 5000.0),
        Kernel("void gemm<2>(float)", 6000.0, 8000.0),
    ]
    row = shares([run, run])
    assert (row["span"], row["products"], row["norms and pointwise"], row["gaps"]) == (7.0, 5.0, 3.0, 1.0)
    assert (row["attention"], row["copies"], row["calls"]) == (0.0, 0.0, 3)
    assert row["longest"] == [["gemm", 5.0], ["triton_norm", 3.0]]
    assert row["between"] == [["triton_norm, gemm", 1.0]]
