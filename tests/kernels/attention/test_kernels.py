"""The kernels that run on a CPU against softmax in float64; the others' wiring, with stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch import Tensor, nn

from fxsplit_encoder.errors import UnsupportedTowerError
from fxsplit_encoder.kernels import kernel as kernel_module
from fxsplit_encoder.kernels.attention import (
    KERNELS,
    AttentionKernel,
    AttentionShape,
    dense_attention,
    flash_attn,
    op,
    varlen_attention,
)
from fxsplit_encoder.kernels.attention.builtin import BatchedDense, Masked, PerSegment
from fxsplit_encoder.kernels.attention.flash_attn import WholeWaves, rows_of_whole_waves
from fxsplit_encoder.kernels.attention.hugging_face import (
    IMPLEMENTATION,
    hugging_face_attention,
    use_varlen_attention,
)
from fxsplit_encoder.kernels.attention.op import attend

from .fakes import FakeFlashAttention, assert_attends, cumulative, fused_qkv, reference, run_with_triton

HEADS, HEAD_DIM = 3, 8
CPU = torch.device("cpu")
PACKED: list[AttentionKernel] = [PerSegment(), Masked()]
BY_NAME = {kernel.name: kernel for kernel in KERNELS}


def attend_or_out(*call: Any) -> Tensor:
    return attend(*call)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.sampled_from([0.1, 0.35, 1.0]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_each_segment_attends_within_itself(lengths: list[int], scale: float, dtype: torch.dtype) -> None:
    rows = sum(lengths)
    for kernel in (*PACKED, attend_or_out):
        assert_attends(kernel, fused_qkv(rows, seed=rows, dtype=dtype), lengths, rows, scale)


def test_results_are_contiguous_whatever_the_strides_of_the_query() -> None:
    q, k, v = (torch.randn(HEADS, 6, HEAD_DIM).transpose(0, 1) for _ in range(3))
    for kernel in (*PACKED, BatchedDense()):
        result = kernel(q, k, v, cumulative([6]), 6, 0.4)
        assert result.is_contiguous(), kernel.name
        torch.testing.assert_close(result.double(), reference(q, k, v, [6], 0.4), rtol=1e-5, atol=1e-6)


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(1, 6), st.booleans())
def test_equal_segments_may_be_a_batch(length: int, count: int, into: bool) -> None:
    rows, lengths = length * count, [length] * count
    q, k, v = fused_qkv(rows, seed=rows)
    out = torch.full((rows + 2, HEADS, HEAD_DIM), 5.0) if into else None
    # The lengths themselves are not read: a slice of longer ones will do.
    result = BatchedDense()(q, k, v, cumulative([3, *lengths])[1:], length, 0.4, out)
    torch.testing.assert_close(result[:rows].double(), reference(q, k, v, lengths, 0.4), rtol=1e-5, atol=1e-6)
    if into:
        assert result is out
        assert result[rows:].eq(5).all()


def test_masked_attention_takes_rows_behind_the_last_segment() -> None:
    q, k, v = fused_qkv(10)
    result = Masked()(q, k, v, cumulative([3, 4]), 10, 0.5)
    torch.testing.assert_close(result[:7].double(), reference(q, k, v, [3, 4], 0.5), rtol=1e-5, atol=1e-6)
    assert result.isfinite().all()


def test_the_out_variant_refuses_a_buffer_that_is_too_small() -> None:
    q, k, v = fused_qkv(7)
    with pytest.raises(RuntimeError):
        attend(q, k, v, cumulative([7]), 7, 0.5, torch.zeros(6, HEADS, HEAD_DIM))


def test_every_kernel_says_whether_it_can_run_and_none_raises() -> None:
    reasons = {kernel.name: kernel.unavailable_reason(CPU) for kernel in KERNELS}
    assert len(reasons) == len(KERNELS)
    assert {name for name, reason in reasons.items() if reason is None} == {
        "batched_dense",
        "per_segment",
        "masked",
    }
    assert all(
        reasons[name] == "needs CUDA"
        for name in ("torch_flash", "flash_attn_4_64x128", "triton_64x64", "cudnn_varlen")
    )


@pytest.mark.parametrize("name", ["flash_attn_4", "vllm_flash_attn", "cudnn_varlen", "triton_64x64"])
def test_a_missing_package_is_a_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("cudnn", "flash_attn", "triton", "vllm"):  # also where they are installed
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(kernel_module, "find", kernel_module.find.__wrapped__)
    monkeypatch.setattr(flash_attn, "find", kernel_module.find)
    monkeypatch.setattr(flash_attn, "vllm_function", flash_attn.vllm_function.__wrapped__)
    monkeypatch.setattr(kernel_module, "capability", lambda device: (9, 0))
    monkeypatch.setattr(flash_attn, "capability", lambda device: (9, 0))
    reason = BY_NAME[name].unavailable_reason(torch.device("cuda", 0)) or ""
    assert "ModuleNotFoundError" in reason or "not installed" in reason
    monkeypatch.setattr(kernel_module, "capability", lambda device: (7, 5))
    assert "compute capability" in (BY_NAME[name].unavailable_reason(torch.device("cuda", 0)) or "")


def test_a_broken_package_is_a_reason_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "broken_attention.py").write_text("raise OSError('libcudnn.so.9: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert kernel_module.find("broken_attention", "attend") == (
        None,
        "cannot import broken_attention.attend: OSError: libcudnn.so.9: cannot open",
    )


@pytest.mark.parametrize(
    ("name", "longest"),
    [("flash_attn_4_64x128", 512), ("flash_attn_4_128x128", 2048), ("flash_attn_4_128x128_dense", 2048)],
)
def test_small_tiles_are_tried_for_short_segments_alone(name: str, longest: int) -> None:
    for tokens in (longest, longest + 1):
        of_length = AttentionShape(
            torch.device("cuda"), torch.bfloat16, 2, 64, 2 * tokens, tokens, 2, equal=True
        )
        assert BY_NAME[name].supports(of_length) == (tokens == longest)


# The signature of vLLM's function, as far as it is used.


def flash_vllm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor,
    softmax_scale: float = 0.0,
    out: Tensor | None = None,
    fa_version: int = 2,
) -> Tensor:
    assert fa_version == 3
    lengths = (cu_seqlens_q, cu_seqlens_k, None, None, max_seqlen_q, max_seqlen_k)
    return FakeFlashAttention()(q, k, v, None, *lengths, softmax_scale, None, None, out)[0]


@pytest.mark.parametrize(
    "kernel",
    [
        flash_attn.FlashAttention4(),
        flash_attn.FlashAttention4((64, 128)),
        flash_attn.FlashAttention4((128, 128), probabilities_in_registers=True),
        flash_attn.DenseFlashAttention4(),
        flash_attn.DenseFlashAttention4((128, 128), probabilities_in_registers=True),
        flash_attn.VllmFlashAttention(),
    ],
    ids=lambda kernel: kernel.name,
)
def test_packages_get_what_their_functions_take(
    kernel: AttentionKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = FakeFlashAttention()
    monkeypatch.setattr(kernel_module, "find", lambda module, attribute: (package, None))
    monkeypatch.setattr(flash_attn, "vllm_function", lambda version: (flash_vllm, None))
    monkeypatch.setattr(flash_attn, "capability", lambda device: (9, 0))
    lengths: Sequence[int] = [4, 4] if kernel.needs_equal_segments else [3, 0, 4]
    assert_attends(kernel, fused_qkv(sum(lengths)), lengths, 4, 0.3)
    for call in package.calls:
        wanted = ((None, None), ((64, 128), None), ((128, 128), True))
        assert (call["tile"], call["registers"]) in wanted


def test_vllms_extension_is_found_without_importing_vllm(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "vllm" / "vllm_flash_attn"
    directory.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    (directory / "flash_attn_interface.py").write_text(
        "from . import extension\nFA2_AVAILABLE, FA2_UNAVAILABLE_REASON = False, 'no such file'\n"
        "FA3_AVAILABLE = True\ndef flash_attn_varlen_func(): return extension.number"
    )
    (directory / "extension.py").write_text("number = 3")
    monkeypatch.syspath_prepend(str(tmp_path))
    flash_attn.vllm_function.cache_clear()
    try:
        function, problem = flash_attn.vllm_function(3)
        assert problem is None
        assert function() == 3
        assert flash_attn.vllm_function(2)[1] == "vllm has no FlashAttention 2: no such file"
    finally:
        flash_attn.vllm_function.cache_clear()
        kernel_module.find.cache_clear()
        for name in [name for name in sys.modules if name.startswith(flash_attn.VLLM_ALIAS)]:
            monkeypatch.delitem(sys.modules, name)


# --- Triton's, in its interpreter, where it is installed; GPU tests take it as every kernel


CHECK = """
import itertools, torch
from fxsplit_encoder.kernels.attention import triton_code
from fxsplit_encoder.kernels.attention.triton_code import attend

triton_code.TILE_M, triton_code.TILE_N = 32, 16  # so that few tokens take several

torch.manual_seed(0)
for head_dim in (8, 64, 72, 88, 128):
    for lengths in ([40], [5, 0, 70, 1, 0, 33], [64, 64, 64, 0, 0]):
        tokens, heads = sum(lengths), 2
        q, k, v = torch.randn(tokens + 9, 3, heads, head_dim, dtype=torch.float16).unbind(1)
        boundaries = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        out = torch.full((tokens + 9, heads, head_dim), 7.0, dtype=torch.float16)
        attend(q, k, v, boundaries, 0.3, out)
        expected = torch.full(out.shape, 7.0)
        for start, end in itertools.pairwise(boundaries.tolist()):
            a, b, c = (x[start:end].float().transpose(0, 1) for x in (q, k, v))
            expected[start:end] = (torch.softmax(a @ b.transpose(1, 2) * 0.3, -1) @ c).transpose(0, 1)
        torch.testing.assert_close(out.float(), expected, rtol=0, atol=3e-3)
"""


def test_it_attends_within_segments_and_writes_nothing_else() -> None:
    triton = pytest.importorskip("triton")
    if Version(triton.__version__) < Version("3.7") and Version(numpy.__version__) >= Version("2.4"):
        pytest.skip("the interpreter of Triton before 3.7 takes an array of one entry for a number")
    run_with_triton(CHECK, TRITON_INTERPRET="1")


def test_heads_are_split_in_two_powers_of_two() -> None:
    pytest.importorskip("triton")
    from fxsplit_encoder.kernels.attention.triton_code import split_head

    assert [split_head(n) for n in (64, 72, 80, 88, 128)] == [(64, 0), (64, 16), (64, 16), (64, 32), (128, 0)]


# --- the operators


CU = torch.tensor([0, 3, 4, 4, 9], dtype=torch.int32)
ROWS = 9


def qkv(requires_grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(ROWS, 2, 8, requires_grad=requires_grad) for _ in range(3)]


def test_the_op_is_registered_under_its_name() -> None:
    assert torch.ops.fxsplit.varlen_attention.default is varlen_attention
    assert str(varlen_attention._schema) == (
        "fxsplit::varlen_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, "
        "SymInt max_seqlen, float scale) -> Tensor"
    )


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_torch_finds_the_registration_sound(requires_grad: bool, strided: bool) -> None:
    q, k, v = qkv(requires_grad)
    if strided:
        q, k, v = torch.randn(ROWS, 3, 2, 8, requires_grad=requires_grad).unbind(1)
    torch.library.opcheck(varlen_attention, (q, k, v, CU, ROWS, 0.3))
    if not requires_grad and not strided:
        torch.library.opcheck(dense_attention, (*batch(3, 4), 0.5))


def test_gradients_are_those_of_attention_a_segment_at_a_time() -> None:
    ours, theirs = qkv(requires_grad=True), qkv(requires_grad=True)
    weights = torch.randn(ROWS, 2, 8)
    (varlen_attention(*ours, CU, ROWS, 0.3) * weights).sum().backward()
    (reference(*theirs, CU.diff().tolist(), 0.3).float() * weights).sum().backward()
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.grad is not None and expected.grad is not None
        torch.testing.assert_close(mine.grad, expected.grad)


# --- a batch through the kernels of packed attention


def batch(size: int, tokens: int, *, fused: bool = True) -> tuple[torch.Tensor, ...]:
    qkv = torch.randn(size, tokens, 3, 2, 8)
    parts = [part.transpose(1, 2) for part in qkv.unbind(2)]
    return tuple(parts if fused else [part.contiguous() for part in parts])


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_every_entry_attends_alone(size: int, tokens: int, fused: bool) -> None:
    values = batch(size, tokens, fused=fused)
    result = dense_attention(*values, 0.4)
    torch.testing.assert_close(result, F.scaled_dot_product_attention(*values, scale=0.4))
    assert result.transpose(1, 2).is_contiguous()


def test_lengths_that_a_graph_may_hold_stay_where_they_are() -> None:
    lengths, device = op.EqualLengths(), torch.device("cpu")
    first = lengths.of(3, 4, device)
    assert first.tolist() == [0, 4, 8, 12]
    assert lengths.of(2, 4, device).data_ptr() == first.data_ptr()
    larger = lengths.of(9, 4, device)
    assert larger.tolist() == list(range(0, 40, 4))
    assert lengths.of(3, 4, device).data_ptr() == larger.data_ptr() != first.data_ptr()
    assert first.tolist() == [0, 4, 8, 12]
    assert lengths.of(3, 5, device).tolist() == [0, 5, 10, 15]
    made = lengths.made[4, device]
    assert sum(each.shape[0] for each in made) <= 2 * made[-1].shape[0]


# --- the kernel that cuts a segment's queries


TILE = 4
"""Queries of the large tiles here."""
PROCESSORS = 6


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> FakeFlashAttention:
    """Small tiles and a small GPU: 2 tiles a wave, of 4 queries each."""
    fake = FakeFlashAttention()
    monkeypatch.setattr(kernel_module, "find", lambda module, attribute: (fake, None))
    monkeypatch.setattr(flash_attn, "processors", lambda device: PROCESSORS)
    monkeypatch.setattr(flash_attn, "_OWN_ROWS", ((HEAD_DIM, TILE),))
    return fake


def test_every_row_is_right_whatever_part_of_the_capacity_is_used(package: FakeFlashAttention) -> None:
    @settings(max_examples=60)
    @given(st.integers(1, 45), st.data())
    def check(capacity: int, data: Any) -> None:
        length = data.draw(st.integers(1, capacity))
        values = fused_qkv(capacity, HEADS, HEAD_DIM, seed=length)
        assert_attends(WholeWaves((2, 4)), values, [length], capacity, 0.3)

    check()
    assert {call["tile"] for call in package.calls} == {None, (2, 4)}


@pytest.mark.parametrize("lengths", [[3, 9, 4], [1, 0, 17, 0], [0, 8, 8], [2, 2, 2]])
def test_several_segments_are_right_too(package: FakeFlashAttention, lengths: Sequence[int]) -> None:
    assert_attends(WholeWaves((2, 4)), fused_qkv(18, HEADS, HEAD_DIM), lengths, 18, 0.3)
    assert [call["rows"] for call in package.calls] == [16, 2] * 2


def test_the_rest_gets_the_small_tiles(package: FakeFlashAttention) -> None:
    kernel = WholeWaves((2, 4), probabilities_in_registers=True)
    q, k, v = fused_qkv(19, HEADS, HEAD_DIM)
    kernel(q, k, v, cumulative([19]), 19, 0.3)
    assert package.calls == [
        {"rows": 16, "tile": None, "registers": None},
        {"rows": 3, "tile": (2, 4), "registers": True},
    ]
    package.calls.clear()
    kernel(q[:16], k[:16], v[:16], cumulative([16]), 16, 0.3)  # whole waves as it is
    assert package.calls == [{"rows": 16, "tile": None, "registers": None}]


@pytest.mark.parametrize(
    ("rows", "cut"),
    [
        (1536, 0),  # 128 blocks of 132: less than a wave
        (1764, 1536),
        (3136, 3072),
        (4096, 0),  # the last wave is two thirds full
        (5184, 4608),
        (7056, 6336),
        (6336, 0),  # four waves
        (9216, 0),  # more waves than are worth a cut
    ],
)
def test_cuts_on_hopper(rows: int, cut: int) -> None:
    assert rows_of_whole_waves(rows, heads=16, tile_rows=192, processors=132) == cut
    without_gpu = kernel_module.processors(torch.device("cpu"))
    assert without_gpu == rows_of_whole_waves(rows, 16, 192, without_gpu) == 0


@settings(max_examples=200)
@given(st.integers(1, 20_000), st.integers(1, 200), st.sampled_from([64, 128, 192]), st.integers(0, 200))
def test_what_is_cut_off_are_whole_waves(rows: int, heads: int, tile_rows: int, processors: int) -> None:
    cut = rows_of_whole_waves(rows, heads, tile_rows, processors)
    assert 0 <= cut < rows
    assert cut % tile_rows == 0
    if cut:
        blocks = cut // tile_rows * heads
        # Nothing of a whole wave is left but what tiles of all heads do not divide.
        assert blocks % processors == 0 or processors - blocks % processors < heads
        assert -(-blocks // processors) < -(-(-(-rows // tile_rows) * heads) // processors)


def test_it_is_offered_for_one_long_captured_segment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn, "processors", lambda device: 132)
    kernels = [kernel for kernel in KERNELS if isinstance(kernel, WholeWaves)]
    assert [kernel.name for kernel in kernels] == ["flash_attn_4_waves_64x128", "flash_attn_4_waves_128x128"]

    def offered(head_dim: int = 72, **fields: Any) -> set[bool]:
        values = {"tokens": 3136, "longest": 3136, "segments": 1, **fields}
        shape = AttentionShape(torch.device("cuda"), torch.bfloat16, 16, head_dim, **values)
        return {kernel.supports(shape) for kernel in kernels}

    assert offered() == offered(head_dim=80) == offered(equal=True) == {True}
    assert offered(head_dim=128) == {True}  # 128 queries a tile: 3136 are three waves and a part
    assert offered(segments=2) == offered(host_lengths=True) == {False}
    assert offered(tokens=1024, longest=1024) == offered(tokens=16384, longest=16384) == {False}
    assert offered(head_dim=192) == {False}


# --- attention of the model library


def test_the_rest_of_a_model_keeps_its_own_attention(make_tower: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.visual = make_tower()
            self.other = nn.Module()
            self.other.config = self.visual.config  # type: ignore[assignment]

    model = Model()
    before = model.visual.config._attn_implementation
    shared = model.visual.config
    use_varlen_attention(model.visual)
    assert before != IMPLEMENTATION
    assert model.visual.config._attn_implementation == IMPLEMENTATION
    assert model.visual.blocks[0].attn.config is model.visual.config
    assert model.other.config is shared
    assert shared._attn_implementation == before


def bhsd(batch: int = 2, heads: int = 3, tokens: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, tokens, 8) for _ in range(3))
    return q, k, v


MASK = torch.tensor([[True, False, True, True, False]] * 5).view(1, 1, 5, 5).expand(2, 1, 5, 5)


@pytest.mark.parametrize(
    ("attributes", "given", "expected"),
    [
        ({}, {"scaling": 0.2}, {"scale": 0.2}),
        ({}, {}, {"scale": 8**-0.5}),
        ({}, {"attention_mask": MASK}, {"attn_mask": MASK}),
        ({"is_causal": True}, {}, {"is_causal": True}),
        ({}, {"is_causal": True}, {"is_causal": True}),
        ({"num_key_value_groups": 2}, {}, {"enable_gqa": True}),
    ],
    ids=["scale", "default scale", "mask", "causal module", "causal call", "grouped heads"],
)
def test_without_lengths_every_row_of_the_batch_is_a_sequence(
    attributes: dict[str, Any], given: dict[str, Any], expected: dict[str, Any]
) -> None:
    q, k, v = bhsd(heads=4)
    if "num_key_value_groups" in attributes:
        k, v = k[:, :2], v[:, :2]
    module: Any = SimpleNamespace(**{"is_causal": False, **attributes})
    out, weights = hugging_face_attention(module, q, k, v, **given)
    assert weights is None
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, **expected).transpose(1, 2))


@pytest.mark.parametrize(("module_says", "argument"), [(True, None), (False, True)])
def test_packed_attention_refuses_to_be_causal(module_says: bool, argument: bool | None) -> None:
    q, k, v = bhsd(batch=1, tokens=7)
    cu = torch.tensor([0, 7], dtype=torch.int32)
    module: Any = SimpleNamespace(is_causal=module_says)
    with pytest.raises(UnsupportedTowerError, match="causal"):
        hugging_face_attention(module, q, k, v, cu_seq_lens_q=cu, is_causal=argument)
