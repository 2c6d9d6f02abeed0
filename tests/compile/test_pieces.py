from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fxsplit_encoder._torch import inductor
from fxsplit_encoder._torch.inductor import select_decomp_table
from fxsplit_encoder.compile import pieces
from fxsplit_encoder.compile.layouts import choice_of_layouts
from fxsplit_encoder.compile.pieces import (
    PIECE_COMPILERS,
    Piece,
    compile_eager,
    compile_piece,
    piece_compiler,
)

from .packed_forwards import attend, packed_inputs, trace_packed

FORCED = {"layout_optimization": True, "force_layout_optimization": True}
ASKED = {"layout_optimization": True}

Block = Callable[[Tensor], Tensor]


def blocks(*parts: Block) -> Callable[[Tensor, Any], Tensor]:
    """Parts with an attention between each."""

    def forward(y: Tensor, inputs: Any) -> Tensor:
        for part in parts:
            y = attend(part(y), inputs["cu"])
        return y

    return forward


def distinct(bound: Any) -> list[int]:
    """The compilation numbers of the pieces behind the first attention."""
    return [step.distinct for step in bound.program.pieces][1:-1]


W = [torch.randn(8, 8) for _ in range(3)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda y: torch.rms_norm(y, (8,), eps=1e-5), lambda y: torch.rms_norm(y, (8,), eps=1e-6)),
        (lambda y: y @ W[0], lambda y: y @ W[1].t()),
        (lambda y: y * W[0][0], lambda y: y * W[0][0].double().float()),
        (lambda y: y @ W[0], lambda y: (y.double() @ W[1].double()).float()),
        (lambda y: y * 2, lambda y: y * 2.0000001),
        (lambda y: y + W[0][0], lambda y: y - W[0][0]),
        (lambda y: y.relu() + y.tanh(), lambda y: y.tanh() + y.relu()),
        (lambda y: y.sum(1, keepdim=True) + y, lambda y: y.sum(0, keepdim=True) + y),
    ],
    ids=["eps", "strides", "conversion", "dtype", "constant", "operation", "wiring", "dimension"],
)
def test_other_structures_are_not_shared(one: Block, other: Block) -> None:
    first, between, last = distinct(trace_packed(blocks(one, other, one)))
    assert first == last != between


def test_a_piece_that_reads_one_tensor_twice_is_not_one_that_reads_two() -> None:
    one = blocks(lambda y: y * W[0][0] + W[0][0] * 3, lambda y: y * W[0][0] + W[1][0] * 3)
    assert len(set(distinct(trace_packed(one)))) == 2


def test_piece_compilers_agree() -> None:
    def forward(y: Tensor, i: Any) -> Tensor:
        y = torch.nn.functional.layer_norm(y @ W[0], (8,)) + torch.nn.functional.gelu(y)
        return torch.nn.functional.silu(y).view(-1, 4 * 8)

    expected = trace_packed(forward)
    got = trace_packed(forward, piece_compiler="aot_eager")
    for rows in (8, 12, 40):
        torch.testing.assert_close(got(packed_inputs(rows)), expected(packed_inputs(rows)))


def test_a_callable_compiles_one_structure_once_whatever_its_weights_with_symbolic_rows() -> None:
    compiled: list[fx.GraphModule] = []

    def compile_piece(module: fx.GraphModule, values: Sequence[Any]) -> Callable[..., Any]:
        compiled.append(module)
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        assert len(placeholders) == len(values)
        matrices = [v for v in values if isinstance(v, Tensor) and v.dim() > 1]
        assert any(isinstance(matrix.shape[0], torch.SymInt) for matrix in matrices)
        return compile_eager(module, values)

    forward = blocks(*(lambda y, w=w: (y @ w).relu() for w in W))
    bound = trace_packed(forward, piece_compiler=compile_piece)
    assert len(compiled) == bound.program.num_distinct < len(bound.program.pieces)
    assert len(distinct(bound)) == 3 and len({*distinct(bound)}) == 1
    torch.testing.assert_close(bound(packed_inputs(9)), trace_packed(forward)(packed_inputs(9)))


def test_inputs_that_share_a_traced_value_are_told_apart() -> None:
    a, b, result = (fx.Graph() for _ in range(3))
    with FakeTensorMode():
        value = torch.empty(4, 8)
    x, y = a.placeholder("x"), b.placeholder("y")
    x.meta["val"] = y.meta["val"] = value  # as those of nodes in copies of one block
    node = result.call_function(torch.ops.aten.sub.Tensor, (x, y))
    compiled = compile_piece(Piece((node,), (x, y), (node,)), PIECE_COMPILERS["aot_eager"])
    first, second = torch.randn(4, 8), torch.randn(4, 8)
    torch.testing.assert_close(compiled(first, second)[0], first - second)


def test_auto_is_eager_on_the_cpu_and_inductor_on_cuda() -> None:
    assert piece_compiler("auto", torch.device("cpu")) is PIECE_COMPILERS["eager"]
    assert piece_compiler("auto", torch.device("cuda")) is PIECE_COMPILERS["inductor"]
    assert piece_compiler("aot_eager", torch.device("cuda")) is PIECE_COMPILERS["aot_eager"]
    assert piece_compiler(compile_eager, torch.device("cuda")) is compile_eager


@pytest.mark.slow
def test_inductor_compiles_pieces_for_every_token_count() -> None:
    def forward(y: Tensor, i: Any) -> Tensor:
        y = torch.nn.functional.layer_norm(y @ W[0], (8,)) * W[1][0]
        return torch.nn.functional.gelu(y).view(-1, 4 * 8) @ torch.ones(32, 4)

    forward_blocks = blocks(lambda y: (y @ W[0]).relu(), lambda y: (y @ W[1]).relu())
    bound = trace_packed(lambda y, i: forward(forward_blocks(y, i), i), piece_compiler="inductor")
    expected = trace_packed(lambda y, i: forward(forward_blocks(y, i), i))
    # The program may be asked about sizes only after its pieces, which add conditions, are compiled.
    for rows in (8, 12, 40, 1024):
        assert bound.program.accepts({bound.program.token_symbol: rows})
        torch.testing.assert_close(
            bound(packed_inputs(rows)), expected(packed_inputs(rows)), rtol=1e-4, atol=1e-5
        )


def test_inductor_compiles_pieces_with_long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def compile_inner(module: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        seen.append(type(V.choices))
        return lambda args: module(*args)

    monkeypatch.setattr(inductor, "compile_fx_inner", compile_inner)
    trace_packed(lambda y, i: torch.nn.functional.layer_norm(y, (8,)), piece_compiler="inductor")
    assert seen and set(seen) == {inductor.PersistentRows}


def test_inductor_keeps_the_strides_of_results_where_channels_come_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def convolve(rows: Tensor, depthwise: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.nn.functional.conv2d(rows.relu(), depthwise, padding=3, groups=8)
        return made, torch.nn.functional.conv2d(made, whole, padding=1).relu()

    monkeypatch.setattr(pieces, "choice_of_layouts", lambda graph: FORCED)
    inputs = [torch.randn(shape) for shape in ((2, 8, 6, 6), (8, 1, 7, 7), (8, 8, 3, 3))]
    with FakeTensorMode() as mode, torch.no_grad():
        fakes = [mode.from_tensor(value) for value in inputs]
        graph = make_fx(convolve)(*fakes)
    compiled = PIECE_COMPILERS["inductor"](graph, fakes)
    with torch.no_grad():
        for made, expected in zip(compiled(*inputs), convolve(*inputs), strict=True):
            assert made.stride() == expected.stride()
            torch.testing.assert_close(made, expected)


def symbolic(number: int, sizes: ShapeEnv) -> torch.SymInt:
    symbol = sizes.create_symbol(number, ConstantSource("batch"), DimDynamic.DYNAMIC)
    return sizes.create_symintnode(symbol, hint=number)  # type: ignore[return-value]


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize(
    ("batch", "kernels", "groups", "normalizes", "settings"),
    [
        (None, (4, 7), (1, 8), False, FORCED),  # ConvNeXt: patches, then depthwise between linear layers
        (2, (4, 7), (1, 8), False, FORCED),
        (None, (4, 7), (1, 2), False, {}),  # several channels a group
        (1, (4, 3, 1), (1, 2, 1), True, {}),
        (None, (4, 7, 1), (1, 8, 1), True, {}),  # convolutions of one pixel are the linear layers
        (2, (4, 5, 1), (1, 8, 1), False, ASKED),
        (1, (4, 7, 1), (1, 8, 1), False, {}),  # wide depthwise windows, where nothing reads whole channels
        (1, (4, 7, 1), (1, 8, 1), True, ASKED),
        (1, (3, 1), (1, 1), False, ASKED),
        (None, (4,), (1,), False, {}),  # a patch embedding
        (2, (), (), True, {}),
    ],
)
def test_layouts_of_convolutions_follow_their_kinds(
    batch: int | None,
    kernels: tuple[int, ...],
    groups: tuple[int, ...],
    normalizes: bool,
    settings: dict[str, bool],
    decomposed: bool,
) -> None:
    def convolve(rows: Tensor, weights: list[Tensor]) -> Tensor:
        for weight, count in zip(weights, groups, strict=True):
            rows = F.conv2d(rows, weight, groups=count)
        rows = rows.permute(0, 2, 3, 1)
        return F.layer_norm(rows, (8,)) if normalizes else rows

    sizes = ShapeEnv()
    with FakeTensorMode(shape_env=sizes):  # tensors of a GPU that is not there
        rows = torch.empty(batch or symbolic(2, sizes), 8, 20, 20, device="cuda")
        weights = [
            torch.empty(8, 8 // count, side, side, device="cuda")
            for side, count in zip(kernels, groups, strict=True)
        ]
        table = select_decomp_table() if decomposed else None
        graph = make_fx(convolve, decomposition_table=table)(rows, weights).graph
    assert choice_of_layouts(graph) == settings
