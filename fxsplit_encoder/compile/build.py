"""From an ATen inference graph to a `Program`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxsplit_encoder._torch.dispatch import OpOverload
from fxsplit_encoder._torch.distributed import calls_other_ranks
from fxsplit_encoder.compile.derived import DerivedParameter, DerivedParameters
from fxsplit_encoder.compile.invariance import check_proof, check_rows
from fxsplit_encoder.compile.layouts import keeping_layouts
from fxsplit_encoder.compile.masks import mask_pad_rows
from fxsplit_encoder.compile.options import CompileOptions
from fxsplit_encoder.compile.passes import run_passes
from fxsplit_encoder.compile.pieces import PieceCache, piece_compiler
from fxsplit_encoder.compile.program import Program
from fxsplit_encoder.compile.rewriting import derivation, mark_cuts, mark_parameters, node_value
from fxsplit_encoder.compile.sizes import assumptions_of, expression, guards_of, shape_exprs
from fxsplit_encoder.compile.split import (
    Cut,
    SplitGraph,
    is_scalar,
    split_graph,
    token_symbol_of,
    tokens_unknown,
)
from fxsplit_encoder.compile.splitting_ops import host_op, splitting_targets
from fxsplit_encoder.compile.steps import (
    Region,
    Slots,
    make_steps,
    slots_in,
    tensor_info,
    with_frees,
    with_joins,
)
from fxsplit_encoder.errors import CompileError
from fxsplit_encoder.kernels.attention.ahead import compile_ahead, heads_of
from fxsplit_encoder.kernels.products import compile_ahead as compile_products_ahead


def build_program(module: fx.GraphModule, static_inputs: Sequence[int], options: CompileOptions) -> Program:
    """Masks pad rows, applies the passes, splits the graph, compiles its distinct pieces, and proves what may
    be padded.

    Args:
        module: an ATen inference graph whose nodes carry traced values in `meta["val"]`.
        static_inputs: positions of the parameters and buffers among its inputs.

    Raises:
        CompileError: the graph cannot be split; its message says at which node.
        ConfigError: there is no such pass, or `invariant` not for this graph.
    """
    mark_parameters(module.graph, static_inputs)
    targets = splitting_targets(options.splitting_ops)
    with keeping_layouts(module.graph):
        num_rows = mask_pad_rows(module, targets)
    device = _device(module.graph.output_node().args[0])  # type: ignore[arg-type]
    mark_cuts(module, targets)
    own_heads = heads_of(module.graph.nodes)
    report = run_passes(
        module,
        options.passes,
        device,
        invariant=options.invariant,
    )
    compile_ahead(module.graph.nodes, device, eager=own_heads)
    compile_products_ahead(module.graph.nodes, device)
    if options.invariant:
        check_rows(module, device, options.piece_compiler)
    if options.observe is not None:
        options.observe(module)
    graph = split_graph(module, targets)
    if options.requires_tokens and token_symbol_of(graph.parts) is None:
        raise CompileError(tokens_unknown(graph.parts, options.splitting_ops))
    return _assemble(module, graph, frozenset(static_inputs), num_rows, options, device, report)


def _assemble(
    module: fx.GraphModule,
    graph: SplitGraph,
    static_inputs: frozenset[int],
    num_rows: fx.Node | None,
    options: CompileOptions,
    device: torch.device,
    pass_report: Mapping[str, int],
) -> Program:
    derived = [n for n in graph.placeholders if derivation(n) is not None]
    made_here = {*derived} if num_rows is None else {num_rows, *derived}
    inputs = [n for n in graph.placeholders if n not in made_here]
    slots = Slots()
    for node in (*inputs, *graph.constants, *derived):
        slots.of(node)
    cache = PieceCache(piece_compiler(options.piece_compiler, device, invariant=options.invariant))
    steps = with_joins(make_steps(graph.parts, slots, cache, options))
    outputs = tuple(slots.argument(a) for a in graph.output_args)
    kept = {*slots_in(outputs), *(slots.of(n) for n in (*graph.placeholders, *graph.constants))}
    token_symbol = token_symbol_of(graph.parts)
    region_start = max((i + 1 for i, step in enumerate(steps) if step.kind == "host"), default=0)
    fixed = {*made_here, *graph.constants, *(inputs[i] for i in static_inputs)}
    region = Region(graph.parts[region_start:], graph.output_args, fixed, slots, token_symbol)
    report = region.prove(assumptions_of(inputs))
    if options.invariant:
        check_proof(report, token_symbol)
    hosts = ((host_op(part.node.target), part.node) for part in graph.parts if isinstance(part, Cut))
    if any(op and op.declares_padding and op.declares_padding(*node.args) for op, node in hosts):
        report = replace(report, declared=True)
    return Program(
        steps=tuple(with_frees(steps, kept)),
        num_inputs=len(inputs),
        num_rows_slot=None if num_rows is None else slots.of(num_rows),
        num_slots=len(slots),
        constants={slots.of(n): _attribute(module, n) for n in graph.constants},
        static_inputs=static_inputs,
        symbol_sources=tuple(_symbol_sources(inputs)),
        outputs=outputs,
        output_infos=tuple(
            tensor_info(a) if isinstance(a, fx.Node) and not is_scalar(a) else None for a in graph.output_args
        ),
        input_shapes=tuple(None if is_scalar(n) else tensor_info(n).shape for n in inputs),
        token_symbol=token_symbol,
        collectives=tuple(dict.fromkeys(n.target.name() for n in module.graph.nodes if _calls_ranks(n))),
        tokens_unknown="" if token_symbol is not None else tokens_unknown(graph.parts, options.splitting_ops),
        region_start=region_start,
        region_inputs=tuple(region.inputs.values()),
        region_symbols=region.symbols(with_segments=not report.segments_may_grow),
        device=device,
        padding=report,
        accepts=guards_of(inputs, token_symbol if report.proved else None),
        derived=DerivedParameters(_recipe(node, slots) for node in derived),
        pass_report=pass_report,
    )


def _calls_ranks(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and calls_other_ranks(node.target)


def _device(outputs: Iterable[Any]) -> torch.device:
    """The device of a graph's outputs; mixed devices are the capture's business to refuse."""
    for argument in outputs:
        value = node_value(argument) if isinstance(argument, fx.Node) else None
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device("cpu")


def _attribute(module: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    if not isinstance(value, torch.Tensor):
        raise CompileError(f"the graph holds {node.target}, a {type(value).__name__}; expected a tensor")
    return value


def _recipe(node: fx.Node, slots: Slots) -> DerivedParameter:
    found = derivation(node)
    assert found is not None
    make, sources = found
    read = tuple(slots.of(source) for source in sources)
    return DerivedParameter(slots.of(node), read, make, is_kept=bool(node.users))


def _symbol_sources(inputs: Sequence[fx.Node]) -> list[tuple[str, int, int]]:
    """Where each symbol's value is read. A symbol that is not listed depends on data."""
    sources: dict[str, tuple[int, int]] = {}
    for index, node in enumerate(inputs):
        value = node.meta["val"]
        if isinstance(value, torch.SymInt) and expression(value).is_Symbol:
            sources.setdefault(str(expression(value)), (index, -1))
    for index, node in enumerate(inputs):
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            for dim, expr in enumerate(shape_exprs(value)):
                if expr.is_Symbol:
                    sources.setdefault(str(expr), (index, dim))
    return [(symbol, index, dim) for symbol, (index, dim) in sources.items()]
