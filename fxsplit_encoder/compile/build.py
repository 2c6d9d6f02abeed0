"""Builds a `Program` from an ATen graph: steps whose values live in slots, and the region to capture."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from fxsplit_encoder._torch.distributed import calls_other_ranks
from fxsplit_encoder._torch.symbols import expression_of
from fxsplit_encoder.compile import padding
from fxsplit_encoder.compile.branches import Step
from fxsplit_encoder.compile.derived import DerivedParameters, Recipe
from fxsplit_encoder.compile.invariance import check_proof, check_rows
from fxsplit_encoder.compile.layouts import keeping_layouts
from fxsplit_encoder.compile.masks import mask_pad_rows
from fxsplit_encoder.compile.options import TRACING_PHASES, CompileOptions, host_op, splitting_targets
from fxsplit_encoder.compile.passes import BEFORE_MASKS, passes_for, run_passes
from fxsplit_encoder.compile.pieces import Piece, PieceCompiler, compile_piece, piece_compiler, signature
from fxsplit_encoder.compile.program import Argument, Program, Ref, RegionInput
from fxsplit_encoder.compile.rewriting import (
    derivation,
    fold_host_constants,
    mark_cuts,
    mark_parameters,
    node_value,
    permute_rows,
)
from fxsplit_encoder.compile.sizes import Size, assumptions_of, guards_of, symbol_sources
from fxsplit_encoder.compile.split import Part, is_scalar, split_graph, token_count_of, unpacked_from
from fxsplit_encoder.errors import CompileError
from fxsplit_encoder.kernels.attention.ahead import compile_ahead, heads_of
from fxsplit_encoder.kernels.products.measured import compile_ahead as compile_products_ahead


def build_program(
    module: fx.GraphModule, static_inputs: Sequence[int], options: CompileOptions, *, may_derive: bool = True
) -> Program:
    """Masks pad rows, runs the passes, splits the graph, compiles its pieces and proves padding.

    Args:
        module: an ATen inference graph whose nodes carry traced values in `meta["val"]`.
        static_inputs: positions of the parameters and buffers among its inputs.
        may_derive: whether passes may keep parameters in another form, see `compile.derived`.

    CompileError: the graph cannot be split; its message says at which node. ConfigError: there is no such
    pass, or `invariant` not for this graph.
    """
    mark_parameters(module.graph, static_inputs)
    fold_host_constants(module)
    targets = splitting_targets(options.splitting_ops)
    outputs: Any = module.graph.output_node().args[0]
    values = (node_value(each) for each in outputs if isinstance(each, fx.Node))
    device = next((v.device for v in values if isinstance(v, torch.Tensor)), torch.device("cpu"))
    due = passes_for(options.passes, device, options.invariant, may_derive=may_derive)
    report = run_passes(module, {name: due.pop(name) for name in BEFORE_MASKS if name in due})
    with keeping_layouts(module.graph):
        num_rows = mask_pad_rows(module, targets)
    mark_cuts(module, targets)
    own_heads = heads_of(module.graph.nodes)
    report |= run_passes(module, due)
    compile_ahead(module.graph.nodes, device, eager=own_heads)
    compile_products_ahead(module.graph.nodes, device)
    if options.invariant:
        check_rows(module, device, options.piece_compiler)
    if options.observe is not None:
        options.observe(module)
    parts = split_graph(module, targets)
    return _assemble(module, parts, frozenset(static_inputs), num_rows, options, device, report)


def _assemble(
    module: fx.GraphModule,
    parts: Sequence[Part],
    static_inputs: frozenset[int],
    num_rows: fx.Node | None,
    options: CompileOptions,
    device: torch.device,
    pass_report: Mapping[str, int],
) -> Program:
    token_symbol, unknown = token_count_of(parts, options.splitting_ops)
    if options.requires_tokens and unknown:
        raise CompileError(unknown)
    placeholders, held = (module.graph.find_nodes(op=op) for op in ("placeholder", "get_attr"))
    returned: Any = module.graph.output_node().args[0]
    derived = {n: found for n in placeholders if (found := derivation(n)) is not None}
    made_here = {*derived} if num_rows is None else {num_rows, *derived}
    inputs = [n for n in placeholders if n not in made_here]
    slots: Slots = defaultdict(itertools.count().__next__)
    for node in (*inputs, *held, *derived):
        slots[node]  # numbers it
    compiler = piece_compiler(options.piece_compiler, device, options.invariant)
    steps = with_joins(make_steps(parts, slots, compiler, options))
    outputs = tuple(as_argument(a, slots) for a in returned)
    kept = {*slots_in(outputs), *(slots[n] for n in (*placeholders, *held))}
    region_start = max((i + 1 for i, step in enumerate(steps) if step.kind == "host"), default=0)
    fixed = {*made_here, *held, *(inputs[i] for i in static_inputs)}
    region = Region(parts[region_start:], returned, fixed, slots, token_symbol)
    report = region.prove(assumptions_of(inputs))
    if options.invariant:
        check_proof(report, token_symbol)
    hosts = ((host_op(part.target), part) for part in parts if isinstance(part, fx.Node))
    if any(op and op.declares_padding and op.declares_padding(*node.args) for op, node in hosts):
        report = replace(report, declared=True)
    ops: list[Any] = [node.target for node in module.graph.nodes]

    def recipe_of(node: fx.Node) -> Recipe:
        make, sources = derived[node]
        unread = {each for each in sources if each in derived and not each.users}
        return Recipe(make, tuple(recipe_of(each) if each in unread else slots[each] for each in sources))

    return Program(
        steps=tuple(with_frees(steps, kept)),
        num_inputs=len(inputs),
        num_rows_slot=None if num_rows is None else slots[num_rows],
        num_slots=len(slots),
        constants={slots[n]: _attribute(module, n) for n in held},
        static_inputs=static_inputs,
        symbol_sources=tuple(symbol_sources(inputs)),
        outputs=outputs,
        output_shapes=tuple(map(shape_of, returned)),
        input_shapes=tuple(map(shape_of, inputs)),
        token_symbol=token_symbol,
        collectives=tuple(dict.fromkeys(op.name() for op in ops if calls_other_ranks(op))),
        region_start=region_start,
        region_inputs=tuple(region.inputs.values()),
        region_symbols=region.symbols(with_segments=not report.segments_may_grow),
        device=device,
        padding=report,
        accepts=guards_of(inputs, token_symbol if report.proved else None),
        derived=DerivedParameters({slots[node]: recipe_of(node) for node in derived if node.users}),
        pass_report=pass_report,
    )


def _attribute(module: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    value = attrgetter(str(node.target))(module)
    if not isinstance(value, torch.Tensor):
        raise CompileError(f"the graph holds {node.target}, a {type(value).__name__}; expected a tensor")
    return value


Slots: TypeAlias = defaultdict[fx.Node, int]
"""Numbers of the nodes that have values, in order of first use."""


def as_argument(argument: Any, slots: Slots) -> Argument:
    """Returns a node's argument as that of a step."""
    if isinstance(argument, fx.Node):
        return Size.of(node_value(argument)) if is_scalar(argument) else Ref(slots[argument])
    if isinstance(argument, list | tuple):
        return type(argument)(as_argument(a, slots) for a in argument)
    return argument


def shape_of(node: Any) -> tuple[Size, ...] | None:
    """Returns the traced shape of an input or output; None for numbers."""
    return None if not isinstance(node, fx.Node) or is_scalar(node) else _sizes(node.meta["val"].shape)


def _sizes(numbers: Iterable[int | torch.SymInt]) -> tuple[Size, ...]:
    return tuple(map(Size.of, numbers))


def make_steps(
    parts: Sequence[Part], slots: Slots, compiler: PieceCompiler, options: CompileOptions
) -> list[Step]:
    """Returns the steps of a graph's parts, in order; compiles the distinct pieces and reports progress."""
    steps: list[Step] = []
    compiled: dict[tuple[Any, ...], tuple[int, Callable[..., Any]]] = {}
    num_pieces = sum(isinstance(part, Piece) for part in parts)
    done = TRACING_PHASES
    options.report(done, num_pieces)
    for part in parts:
        if isinstance(part, fx.Node):
            steps.append(_cut_step(part, slots))
            continue
        key = signature(part)
        if key not in compiled:
            compiled[key] = len(compiled), compile_piece(part, compiler)
        steps.append(_piece_step(part, f"piece_{done - TRACING_PHASES}", slots, *compiled[key]))
        done += 1
        options.report(done, num_pieces)
    return steps


def _piece_step(piece: Piece, name: str, slots: Slots, distinct: int, call: Callable[..., Any]) -> Step:
    return Step(
        kind="piece",
        name=name,
        call=call,
        args=tuple(as_argument(n, slots) for n in piece.inputs),
        kwargs={},
        outputs=tuple(slots[n] for n in piece.outputs),
        distinct=distinct,
        nodes=tuple(node.name for node in piece.nodes),
        beside=piece.beside,
    )


def _cut_step(node: fx.Node, slots: Slots) -> Step:
    if isinstance(node.meta["val"], torch.Tensor):
        outputs: tuple[int, ...] = (slots[node],)
    else:
        by_index = {int(n.args[1]): slots[n] for n in unpacked_from(node)}  # type: ignore[arg-type]
        outputs = tuple(by_index.get(i, -1) for i in range(len(node.meta["val"])))
    host = host_op(node.target)
    call = host or node.target
    assert callable(call)
    return Step(
        kind="split" if host is None else "host",
        name=node.name,
        call=call,
        args=tuple(as_argument(a, slots) for a in node.args),
        kwargs={k: as_argument(v, slots) for k, v in node.kwargs.items()},
        outputs=outputs,
        nodes=(node.name,),
    )


def with_joins(steps: Sequence[Step]) -> list[Step]:
    """Marks the steps that read what a side stream computes, unless another has joined it."""
    open_slots: set[int] = set()
    marked: list[Step] = []
    for step in steps:
        if step.beside:
            open_slots.update(step.outputs)
        elif not open_slots.isdisjoint(_read_by(step)):
            step = replace(step, joins=True)
            open_slots.clear()
        marked.append(step)
    return marked


def with_frees(steps: Sequence[Step], kept: Collection[int]) -> list[Step]:
    """Adds to each step the slots that no later one reads, but for `kept`, those of inputs, constants and
    outputs. Slots of a step on a side stream are kept until a step joins it.
    """
    last_use: dict[int, int] = {}
    for index, step in enumerate(steps):
        joined = next((i for i in range(index, len(steps)) if steps[i].joins), len(steps))
        for slot in (*step.outputs, *_read_by(step)):
            last_use[slot] = max(last_use.get(slot, 0), joined if step.beside else index)
    frees: list[list[int]] = [[] for _ in steps]
    for slot, index in last_use.items():
        if slot >= 0 and slot not in kept and index < len(steps):
            frees[index].append(slot)
    return [replace(step, frees=tuple(f)) for step, f in zip(steps, frees, strict=True)]


def _read_by(step: Step) -> list[int]:
    return slots_in((step.args, tuple(step.kwargs.values())))


def slots_in(argument: Argument) -> list[int]:
    """Returns the slots that an argument refers to, nested ones included."""
    if isinstance(argument, Ref):
        return [argument.slot]
    if isinstance(argument, list | tuple):
        return [slot for a in argument for slot in slots_in(a)]
    return []


class Region:
    """The parts of a graph after its last host op. `fixed` are inputs that are the same from call
    to call, or that the program makes itself.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        outputs: Sequence[Any],
        fixed: Collection[fx.Node],
        slots: Slots,
        token_symbol: str | None,
    ) -> None:
        self._token_symbol = token_symbol
        cuts = [part for part in parts if isinstance(part, fx.Node)]
        self._nodes = [
            node
            for part in parts
            for node in ((part, *unpacked_from(part)) if isinstance(part, fx.Node) else part.nodes)
        ]
        self._outputs = [output for output in outputs if isinstance(output, fx.Node)]
        segments = {cut.args[3] for cut in cuts if "varlen_attention" in str(cut.target)}
        permutations = {node.args[1] for node in self._nodes if node.target is permute_rows}
        read = dict.fromkeys((*(i for node in self._nodes for i in node.all_input_nodes), *self._outputs))
        known = {*self._nodes, *fixed}
        self.inputs = {
            node: RegionInput(
                slot=slots[node],
                shape=_sizes(node.meta["val"].shape),
                strides=_sizes(node.meta["val"].stride()),
                dtype=node.meta["val"].dtype,
                device=node.meta["val"].device,
                is_segments=node in segments,
                token_dim=None
                if node in segments or token_symbol is None
                else padding.token_dim(node.meta["val"], token_symbol),
                is_permutation=node in permutations,
            )
            for node in read
            if node not in known and not is_scalar(node)
        }
        """Inputs of the region that change from call to call, in order of first use."""

    def symbols(self, *, with_segments: bool) -> tuple[str, ...]:
        """Returns the symbols of sizes and numbers inside the region, other than the token symbol and those
        that only compilers get; `with_segments`: with those of the number of segments, whatever reads them.
        """
        values = [
            n.meta.get("val")  # an assertion has none
            for node in self._nodes
            for n in (node, *(i for i in node.all_input_nodes if is_scalar(i)))
        ]
        used = {symbol for value in values for symbol in _symbols_in(value)}
        counted = [entry for entry in self.inputs.values() if with_segments or not entry.is_segments]
        sizes = [size for entry in counted for size in entry.shape]
        used |= {symbol for size in sizes for symbol in size.symbols}
        return tuple(sorted(used - {self._token_symbol or ""}))

    def prove(self, assumptions: Sequence[sympy.Basic]) -> padding.PaddingReport:
        """Proves that the region may be padded, given what the trace assumes of its symbols."""
        if self._token_symbol is None:
            reason = ("graph", "no dimension of a splitting op's query is symbolic")
            refusal = padding.capture_refusal(self._nodes)
            return padding.PaddingReport((reason,), segments_may_grow=False, capture_refusal=refusal)
        seeds: dict[fx.Node, padding.State] = {
            node: padding.SEGMENTS
            if entry.is_segments
            else padding.SHARED
            if entry.token_dim is None
            else padding.Rows(entry.token_dim)
            for node, entry in self.inputs.items()
        }
        return padding.analyse(self._nodes, seeds, self._token_symbol, assumptions, self._outputs)


def _symbols_in(value: Any) -> set[str]:
    if isinstance(value, list | tuple):
        return {symbol for v in value for symbol in _symbols_in(v)}
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return {str(s) for size in sizes if hasattr(size, "node") for s in expression_of(size).free_symbols}
