from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

from fxsplit_encoder.compile.options import HostOp, register_host_op

from .packed_forwards import attend, trace_with

_library = torch.library.Library("fxsplit_test_host", "DEF")
_library.define("lengths(Tensor x, Tensor sizes) -> Tensor[]")


def _exact(x: Tensor, sizes: Tensor) -> list[Tensor]:
    cu = torch.tensor([0, *sizes.cumsum(0).tolist()], dtype=torch.int32)
    return [torch.arange(x.shape[0]), cu]


def _padded(x: Tensor, sizes: Tensor) -> list[Tensor]:
    positions, cu = _exact(x, sizes)
    full = cu.new_full((x.shape[0] + 1,), x.shape[0])
    full[: cu.shape[0]] = cu
    return [positions, full]


_library.impl("lengths", _padded, "CompositeExplicitAutograd")


@torch.library.register_fake("fxsplit_test_host::lengths", lib=_library)
def _fake(x: Tensor, sizes: Tensor) -> list[Tensor]:
    rows = x.shape[0]
    return [torch.empty(rows, dtype=torch.int64), torch.empty(rows + 1, dtype=torch.int32)]


lengths = torch.ops.fxsplit_test_host.lengths.default


@pytest.fixture
def registered() -> Iterator[HostOp]:
    op = HostOp(_exact)
    register_host_op(lengths, op)
    yield op
    del lengths.fxsplit_host_op


def forward(inputs: Mapping[str, Tensor]) -> Tensor:
    x = inputs["x"] * 2
    positions, cu = lengths(x, inputs["sizes"])
    return attend(x + positions[:, None], cu)


EXAMPLES = {"x": torch.randn(12, 8), "sizes": torch.tensor([5, 7])}


def test_a_host_op_ends_the_prologue_and_runs_exactly(registered: HostOp) -> None:
    bound = trace_with(forward, EXAMPLES)
    program = bound.program
    assert [step.kind for step in program.steps] == ["piece", "host", "piece", "split", "piece"]
    assert program.region_start == 2
    assert program.host_steps[0].call is registered
    assert program.padding.proved, str(program.padding)
    for batch in ([5, 7], [2, 3, 4], [9]):
        x = torch.randn(sum(batch), 8)
        inputs = {"x": x, "sizes": torch.tensor(batch)}
        torch.testing.assert_close(bound(inputs), forward(inputs))
    bindings = program.begin(bound.arguments({"x": torch.randn(9, 8), "sizes": torch.tensor([4, 5])}))
    segments = next(entry for entry in program.region_inputs if entry.is_segments)
    # Not padded to ten entries, as the op's own kernel would.
    assert bindings.slots[segments.slot].tolist() == [0, 4, 9]
    assert sorted(entry.token_dim for entry in program.region_inputs if entry.token_dim is not None) == [0, 0]


def test_an_op_that_is_not_registered_stays_in_its_piece() -> None:
    program = trace_with(forward, EXAMPLES).program
    assert program.host_steps == []
    assert not program.padding.proved
