"""The graph that is described to cuDNN's front end, run by a stand-in that does as described."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fxsplit_encoder.attention.kernels import cudnn_varlen
from fxsplit_encoder.attention.kernels.cudnn_varlen import CudnnVarlen
from fxsplit_encoder.errors import CaptureError

from .fakes import cumulative, fused_qkv, reference


class Described:
    """A tensor of the graph."""

    def __init__(self, dim: Any = None, stride: Any = None, data_type: Any = None, uid: int = -1) -> None:
        self.dim, self.stride, self.data_type, self.uid = dim, stride, data_type, uid
        self.offset: Described | None = None

    def __getattr__(self, name: str) -> Any:
        def set_it(value: Any) -> Described:
            setattr(self, name.removeprefix("set_"), value)
            return self

        return set_it

    def set_ragged_offset(self, offset: Described) -> Described:
        self.offset = offset
        return self

    def segment(self, bound: dict[int, Tensor], number: int, length: int) -> Tensor:
        """(heads, length, head_dim) of one segment, by offset and strides alone."""
        assert self.offset is not None
        offsets = bound[self.offset.uid]
        assert list(offsets.shape) == self.offset.dim
        assert offsets.dtype == self.offset.data_type
        tensor = bound[self.uid]
        assert tensor.dtype == self.data_type
        start = int(offsets[number]) + tensor.storage_offset()
        return tensor.as_strided((self.dim[1], length, self.dim[3]), self.stride[1:], start)


class Graph:
    built = 0

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.steps: list[str] = []

    def tensor(self, **description: Any) -> Described:
        return Described(**description)

    def sdpa(self, **arguments: Any) -> tuple[Described, None]:
        self.arguments, self.out = arguments, Described()
        return self.out, None

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.steps.append(name)

    def get_workspace_size(self) -> int:
        Graph.built += 1
        assert self.steps[-2:] == ["check_support", "build_plans"]
        return 3

    def execute(self, bound: dict[int, Tensor], workspace: Tensor, handle: Any) -> None:
        assert handle == "handle"
        assert workspace.numel() == 3
        given, lengths = self.arguments, bound[self.arguments["seq_len_q"].uid]
        assert given["use_padding_mask"]
        assert lengths.dtype == given["seq_len_q"].data_type == torch.int32
        assert list(lengths.shape) == given["seq_len_q"].dim
        assert torch.equal(lengths, bound[given["seq_len_kv"].uid])
        assert lengths.max() <= given["q"].dim[2]
        for number, length in enumerate(lengths.flatten().tolist()):
            q, k, v = (given[name].segment(bound, number, length) for name in "qkv")
            weights = torch.softmax(q.float() @ k.float().transpose(1, 2) * given["attn_scale"], -1)
            self.out.segment(bound, number, length).copy_(weights @ v.float())


@pytest.fixture(autouse=True)
def front_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cudnn: Any = types.ModuleType("cudnn")
    cudnn.data_type = types.SimpleNamespace(
        BFLOAT16=torch.bfloat16, HALF=torch.float16, FLOAT=torch.float32, INT32=torch.int32, INT64=torch.int64
    )
    cudnn.heur_mode = types.SimpleNamespace(A="A", FALLBACK="FALLBACK")
    cudnn.pygraph = Graph
    cudnn.create_handle = lambda: "handle"
    cudnn.set_stream = lambda handle, stream: None
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    monkeypatch.setattr(cudnn_varlen, "_thread", cudnn_varlen._Thread())
    monkeypatch.setattr(torch.cuda, "device", torch.device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    Graph.built = 0
    yield


@pytest.mark.parametrize("lengths", [[7], [3, 0, 4], [2, 2, 2], [1, 5, 0, 0]])
@pytest.mark.parametrize("contiguous", [False, True])
def test_offsets_and_lengths_find_the_segments(lengths: list[int], contiguous: bool) -> None:
    rows = sum(lengths) + 2  # two behind the last segment
    values = fused_qkv(rows, dtype=torch.float16)
    if contiguous:
        values = values[0].contiguous(), values[1], values[2].contiguous()
    kernel = CudnnVarlen()
    expected = reference(*values, lengths, 0.3)
    out = torch.full_like(values[0], 5.0, memory_format=torch.contiguous_format)
    assert kernel(*values, cumulative(lengths), 6 + lengths[0], 0.3, out) is out
    torch.testing.assert_close(out[:-2].double(), expected, rtol=1e-2, atol=1e-2)
    assert out[-2:].eq(5).all()
    result = kernel(*values, cumulative(lengths), 6 + lengths[0], 0.3)
    torch.testing.assert_close(result[:-2], out[:-2])
    assert Graph.built == 1


def test_another_shape_is_another_plan_and_other_lengths_are_not() -> None:
    values, kernel = fused_qkv(8, dtype=torch.float16), CudnnVarlen()
    for lengths in ([4, 4], [8, 0], [1, 6]):
        kernel(*values, cumulative(lengths), 8, 0.3)
    assert Graph.built == 1
    kernel(*values, cumulative([4, 4]), 4, 0.3)
    kernel(*values, cumulative([8]), 8, 0.3)
    assert Graph.built == 3


def test_nothing_is_planned_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    values = fused_qkv(8, dtype=torch.float16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match="not planned before"):
        CudnnVarlen()(*values, cumulative([8]), 8, 0.3)
