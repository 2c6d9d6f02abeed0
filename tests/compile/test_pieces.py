from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxsplit_encoder.compile.pieces import (
    PIECE_COMPILERS,
    compile_eager,
    piece_compiler,
    start_compile_workers,
)

Block = Callable[[Tensor], Tensor]


def blocks(*parts: Block) -> Callable[[Tensor, Any], Tensor]:
    """Parts with an attention between each."""

    def forward(y: Tensor, inputs: Any) -> Tensor:
        for part in parts:
            q = part(y).view(-1, 2, 4)
            y = torch.ops.fxsplit.varlen_attention(q, q, q, inputs["cu"], q.shape[0], 0.5).view(-1, 8)
        return y

    return forward


def distinct(bound: Any) -> list[int]:
    """The compilation numbers of the pieces behind the first attention."""
    return [step.distinct for step in bound.program.pieces][1:-1]


W = [torch.randn(8, 8) for _ in range(3)]


def test_the_same_structure_with_other_weights_is_compiled_once(trace: Any, inputs: Any) -> None:
    forward = blocks(*(lambda y, w=w: (y @ w).relu() for w in W))
    bound = trace(forward)
    assert len(set(distinct(bound))) == 1
    assert len(distinct(bound)) == 3
    x, cu = inputs(9)["x"], inputs(9)["cu"]
    q = x.view(-1, 2, 4)
    first = torch.ops.fxsplit.varlen_attention(q, q, q, cu, 9, 0.5).view(-1, 8)
    torch.testing.assert_close(bound(inputs(9)), forward(first, inputs(9)))


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
def test_other_structures_are_not_shared(one: Block, other: Block, trace: Any) -> None:
    assert len(set(distinct(trace(blocks(one, other))))) == 2
    assert len(set(distinct(trace(blocks(one, one))))) == 1


def test_a_piece_that_reads_one_tensor_twice_is_not_one_that_reads_two(trace: Any) -> None:
    one = blocks(lambda y: y * W[0][0] + W[0][0] * 3, lambda y: y * W[0][0] + W[1][0] * 3)
    assert len(set(distinct(trace(one)))) == 2


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_piece_compilers_agree(name: str, trace: Any, inputs: Any) -> None:
    def forward(y: Tensor, i: Any) -> Tensor:
        y = torch.nn.functional.layer_norm(y @ W[0], (8,)) + torch.nn.functional.gelu(y)
        return torch.nn.functional.silu(y).view(-1, 4 * 8)

    expected = trace(forward)
    got = trace(forward, piece_compiler=name)
    for rows in (8, 12, 40):
        torch.testing.assert_close(got(inputs(rows)), expected(inputs(rows)))


def test_a_callable_compiles_each_distinct_piece_once_with_symbolic_rows(trace: Any, inputs: Any) -> None:
    compiled: list[fx.GraphModule] = []

    def compile_piece(module: fx.GraphModule, values: Sequence[Any]) -> Callable[..., Any]:
        compiled.append(module)
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        assert len(placeholders) == len(values)
        assert any(
            isinstance(v, torch.Tensor) and isinstance(v.shape[0], torch.SymInt)
            for v in values
            if _is_matrix(v)
        )
        return compile_eager(module, values)

    forward = blocks(*(lambda y, w=w: (y @ w).relu() for w in W))
    bound = trace(forward, piece_compiler=compile_piece)
    assert len(compiled) == bound.program.num_distinct < len(bound.program.pieces)
    torch.testing.assert_close(bound(inputs(9)), trace(forward)(inputs(9)))


def _is_matrix(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1


def test_auto_is_eager_on_the_cpu_and_inductor_on_cuda() -> None:
    assert piece_compiler("auto", torch.device("cpu")) is PIECE_COMPILERS["eager"]
    assert piece_compiler("auto", torch.device("cuda")) is PIECE_COMPILERS["inductor"]
    assert piece_compiler("aot_eager", torch.device("cuda")) is PIECE_COMPILERS["aot_eager"]
    assert piece_compiler(compile_eager, torch.device("cuda")) is compile_eager


@pytest.mark.slow
def test_inductor_compiles_pieces_for_every_token_count(trace: Any, inputs: Any) -> None:
    def forward(y: Tensor, i: Any) -> Tensor:
        y = torch.nn.functional.layer_norm(y @ W[0], (8,)) * W[1][0]
        return torch.nn.functional.gelu(y).view(-1, 4 * 8) @ torch.ones(32, 4)

    forward_blocks = blocks(lambda y: (y @ W[0]).relu(), lambda y: (y @ W[1]).relu())
    bound = trace(lambda y, i: forward(forward_blocks(y, i), i), piece_compiler="inductor")
    expected = trace(lambda y, i: forward(forward_blocks(y, i), i))
    # The program may be asked about sizes only after its pieces, which add conditions, are compiled.
    for rows in (8, 12, 40, 1024):
        assert bound.program.accepts({bound.program.token_symbol: rows})
        torch.testing.assert_close(bound(inputs(rows)), expected(inputs(rows)), rtol=1e-4, atol=1e-5)


def test_inductors_workers_are_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("fxsplit_encoder._torch.inductor.start_workers", lambda: calls.append("pool"))
    start_compile_workers.cache_clear()
    for _ in range(2):
        start_compile_workers()
    start_compile_workers.cache_clear()
    assert calls == ["pool"]


def test_inductor_compiles_pieces_with_long_rows(trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.virtualized import V

    from fxsplit_encoder._torch import inductor

    seen = []

    def compile_inner(module: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        seen.append(type(V.choices))
        return lambda args: module(*args)

    monkeypatch.setattr(inductor, "compile_fx_inner", compile_inner)
    trace(lambda y, i: torch.nn.functional.layer_norm(y, (8,)), piece_compiler="inductor")
    assert seen and set(seen) == {inductor.PersistentRows}
