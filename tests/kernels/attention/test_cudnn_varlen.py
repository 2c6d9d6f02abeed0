"""The graph that is described to cuDNN's front end, run by a stand-in that does as described."""

from __future__ import annotations

import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fxsplit_encoder.errors import CaptureError
from fxsplit_encoder.kernels import compiled, store
from fxsplit_encoder.kernels.attention import cudnn_varlen
from fxsplit_encoder.kernels.attention.cudnn_varlen import CudnnVarlen
from fxsplit_encoder.kernels.compiled import compiled_kernels, restore_kernels

from .fakes import assert_attends, cumulative, fused_qkv

CPU = torch.device("cpu")


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
    kept: ClassVar[list[Graph]] = []

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

    def build_plans(self) -> None:
        Graph.built += 1
        assert self.steps[-1] == "check_support"
        self.steps.append("build_plans")

    def get_workspace_size(self) -> int:
        assert self.steps[-1] == "build_plans"
        return 3

    def serialize(self) -> list[int]:
        Graph.kept.append(self)
        return list(b"plan %d" % (len(Graph.kept) - 1))

    def deserialize(self, handle: Any, content: bytes) -> None:
        assert handle == "handle"
        other = Graph.kept[int(content.removeprefix(b"plan "))]
        self.arguments, self.out, self.steps = other.arguments, other.out, other.steps

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


def forget_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another process, which has the same files."""
    monkeypatch.setattr(cudnn_varlen, "_thread", cudnn_varlen.ThreadPlans([]))
    plan_files = cudnn_varlen.PlanFiles()
    for module in (cudnn_varlen, compiled):
        monkeypatch.setattr(module, "PLAN_FILES", plan_files)


@pytest.fixture(autouse=True)
def front_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(cudnn_varlen, "describe_environment", lambda device: {"gpu": "one"})
    cudnn: Any = types.ModuleType("cudnn")
    cudnn.data_type = types.SimpleNamespace(
        BFLOAT16=torch.bfloat16, HALF=torch.float16, FLOAT=torch.float32, INT32=torch.int32, INT64=torch.int64
    )
    cudnn.heur_mode = types.SimpleNamespace(A="A", FALLBACK="FALLBACK")
    cudnn.pygraph = Graph
    cudnn.create_handle = lambda: "handle"
    cudnn.set_stream = lambda handle, stream: None
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    forget_all(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", torch.device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    Graph.built, Graph.kept = 0, []


@pytest.mark.parametrize("lengths", [[7], [3, 0, 4], [2, 2, 2], [1, 5, 0, 0]])
@pytest.mark.parametrize("contiguous", [False, True])
def test_offsets_and_lengths_find_the_segments(lengths: list[int], contiguous: bool) -> None:
    rows = sum(lengths) + 2  # two behind the last segment
    values = fused_qkv(rows, dtype=torch.float16)
    if contiguous:
        values = values[0].contiguous(), values[1], values[2].contiguous()
    assert_attends(CudnnVarlen(), values, lengths, 6 + lengths[0], 0.3)
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


def attend(segments: int = 2) -> Tensor:
    values = fused_qkv(8, dtype=torch.float16)
    return CudnnVarlen()(*values, cumulative([8 // segments] * segments), 8, 0.3)


def attend_in_another_thread(segments: int = 2) -> Tensor:
    """Which has planned nothing itself."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(attend, segments).result()


def plans(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_another_thread_and_another_process_read_what_was_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = attend()
    in_thread = attend_in_another_thread()
    forget_all(monkeypatch)
    in_process = attend()
    assert Graph.built == 1 and len(plans(tmp_path)) == 1
    for result in (in_thread, in_process):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    attend(4)
    assert Graph.built == 2 and len(plans(tmp_path)) == 2


def test_a_plan_outlives_its_thread_and_serves_the_next_but_no_two_at_once() -> None:
    """A captured graph reads its memory."""
    kept, own = cudnn_varlen.ThreadPlans([]), {("a shape",): object()}
    with ThreadPoolExecutor(1) as first:
        first.submit(lambda: kept.plans.update(own)).result()
        assert not kept.plans, "of another thread that lives"
    with ThreadPoolExecutor(1) as second, ThreadPoolExecutor(1) as third:
        found = [each.submit(lambda: dict(kept.plans)).result() for each in (second, third)]
    assert found == [own, {}]


def test_a_plan_that_is_none_of_cudnns_is_built_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = attend()
    (path,) = plans(tmp_path)
    cudnn_varlen.PLAN_FILES.store(CPU).write(path.name, b"another")
    forget_all(monkeypatch)
    torch.testing.assert_close(attend(), expected, rtol=0, atol=0)
    assert Graph.built == 2
    forget_all(monkeypatch)
    attend()
    assert Graph.built == 2, "it was mended on disk"


def test_a_front_end_that_keeps_nothing_still_attends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(graph: Graph) -> bytes:
        raise RuntimeError("not of this plan")

    expected = attend()
    forget_all(monkeypatch)
    monkeypatch.setattr(Graph, "serialize", refuse)
    monkeypatch.setattr(store, "cache_directory", lambda: tmp_path / "other")
    torch.testing.assert_close(attend(), expected, rtol=0, atol=0)
    assert Graph.built == 2 and len(plans(tmp_path)) == 1


def test_a_start_file_holds_the_plans_of_captures_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    attend(2)
    attend(4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    expected = attend(4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    files = {name: content for name, content in compiled_kernels(CPU).items() if name.startswith("cudnn/")}
    assert len(files) == 1
    forget_all(monkeypatch)
    monkeypatch.setattr(store, "cache_directory", lambda: tmp_path / "other")
    restore_kernels(files, CPU)
    torch.testing.assert_close(attend(4), expected, rtol=0, atol=0)
    assert Graph.built == 2
