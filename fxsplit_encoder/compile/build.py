"""From an ATen inference graph to a `Program`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxsplit_encoder.compile import padding
from fxsplit_encoder.compile.derived import DerivedParameter, DerivedParameters
from fxsplit_encoder.compile.host import host_op
from fxsplit_encoder.compile.masks import mask_pad_rows
from fxsplit_encoder.compile.passes import run_passes
from fxsplit_encoder.compile.permute import permute_rows
from fxsplit_encoder.compile.pieces import PieceCache, piece_compiler
from fxsplit_encoder.compile.program import Program, Ref, RegionInput, Step, TensorInfo
from fxsplit_encoder.compile.rewriting import derivation, mark_parameters
from fxsplit_encoder.compile.sizes import Size, SymbolValues, expression, shape_exprs, symbol_of
from fxsplit_encoder.compile.split import (
    Cut,
    SplitGraph,
    is_scalar,
    node_value,
    split_graph,
    splitting_targets,
)
from fxsplit_encoder.errors import CompileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fxsplit_encoder.config import EncoderConfig

_VARLEN = "varlen_attention"
TRACING_PHASES = 2
"""What progress counts beside the pieces: the Python forward traced, its ATen graph traced and split."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What a build needs of the configuration."""

    splitting_ops: tuple[str, ...]
    piece_compiler: str | Callable[..., Any]
    progress: Callable[[int, int], None] | None = None
    """Called with (done, total) after each phase of the tracing and each piece; until the graph is split the
    total counts one piece.
    """
    passes: tuple[str, ...] | None = None
    """Names of `compile.passes.PASSES`; None: those that pay on the graph's device."""
    precision: str = "auto"
    """"auto" or "fp8", see `EncoderConfig.precision`."""

    @classmethod
    def of(cls, config: EncoderConfig) -> CompileOptions:
        """What a configuration says of building."""
        passes = None if config.passes == "auto" else config.passes
        return cls(config.splitting_ops, config.piece_compiler, passes=passes, precision=config.precision)

    def report(self, done: int, num_pieces: int = 1) -> None:
        """Tells that so many phases and pieces are done."""
        if self.progress is not None:
            self.progress(done, TRACING_PHASES + num_pieces)


def build_program(module: fx.GraphModule, static_inputs: Sequence[int], options: CompileOptions) -> Program:
    """Masks pad rows, applies the passes, splits the graph, compiles its distinct pieces, and proves what may
    be padded.

    Args:
        module: an ATen inference graph whose nodes carry traced values in `meta["val"]`.
        static_inputs: positions of the parameters and buffers among its inputs.

    Raises:
        CompileError: the graph cannot be split; its message says at which node.
        ConfigError: a pass or the precision is not possible.
    """
    mark_parameters(module.graph, static_inputs)
    targets = splitting_targets(options.splitting_ops)
    num_rows = mask_pad_rows(
        module, [n for n in module.graph.nodes if n.target in targets and _VARLEN in str(n.target)]
    )
    device = _device(module.graph.output_node().args[0])  # type: ignore[arg-type]
    report = run_passes(module, options.passes, options.precision, device)
    graph = split_graph(module, targets)
    return _Builder(module, graph, frozenset(static_inputs), num_rows, options).build(device, report)


class _Builder:
    def __init__(
        self,
        module: fx.GraphModule,
        graph: SplitGraph,
        static_inputs: frozenset[int],
        num_rows: fx.Node | None,
        options: CompileOptions,
    ) -> None:
        self.module = module
        self.graph = graph
        self.static_inputs = static_inputs
        self.num_rows = num_rows
        self.derived = [n for n in graph.placeholders if derivation(n) is not None]
        made_here = {num_rows, *self.derived}
        self.graph_inputs = [n for n in graph.placeholders if n not in made_here]
        self.options = options
        self.slots: dict[fx.Node, int] = {}

    def build(self, device: torch.device, pass_report: Mapping[str, int]) -> Program:
        graph = self.graph
        for node in (*self.graph_inputs, *graph.constants, *self.derived):
            self._slot(node)
        steps = self._free_slots(self._steps(PieceCache(piece_compiler(self.options.piece_compiler, device))))
        token_symbol = self._token_symbol()
        region_start = max((i + 1 for i, step in enumerate(steps) if step.kind == "host"), default=0)
        region_inputs = self._region_inputs(region_start, token_symbol)
        report = self._prove(region_start, region_inputs, token_symbol, _accepts(self.graph_inputs))
        return Program(
            steps=tuple(steps),
            num_inputs=len(self.graph_inputs),
            num_rows_slot=None if self.num_rows is None else self._slot(self.num_rows),
            num_slots=len(self.slots),
            constants={self.slots[n]: _attribute(self.module, n) for n in graph.constants},
            static_inputs=self.static_inputs,
            symbol_sources=tuple(self._symbol_sources()),
            outputs=tuple(self._argument(a) for a in graph.output_args),
            output_infos=tuple(
                _info(a) if isinstance(a, fx.Node) and not is_scalar(a) else None for a in graph.output_args
            ),
            input_shapes=tuple(None if is_scalar(n) else _info(n).shape for n in self.graph_inputs),
            token_symbol=token_symbol,
            region_start=region_start,
            region_inputs=region_inputs,
            region_symbols=self._region_symbols(region_start, region_inputs, token_symbol),
            device=device,
            padding=report,
            accepts=_accepts(self.graph_inputs, token_symbol if report.proved else None),
            derived=DerivedParameters(self._recipe(node) for node in self.derived),
            pass_report=pass_report,
        )

    def _slot(self, node: fx.Node) -> int:
        return self.slots.setdefault(node, len(self.slots))

    def _recipe(self, node: fx.Node) -> DerivedParameter:
        found = derivation(node)
        assert found is not None
        make, sources = found
        return DerivedParameter(self._slot(node), tuple(self._slot(source) for source in sources), make)

    # --- steps

    def _steps(self, cache: PieceCache) -> list[Step]:
        steps: list[Step] = []
        num_pieces = sum(1 for part in self.graph.parts if not isinstance(part, Cut))
        done = TRACING_PHASES
        self.options.report(done, num_pieces)
        for part in self.graph.parts:
            if isinstance(part, Cut):
                steps.append(self._cut_step(part))
                continue
            distinct, call = cache.get(part)
            steps.append(
                Step(
                    kind="piece",
                    name=f"piece_{done - TRACING_PHASES}",
                    call=call,
                    args=tuple(self._argument(n) for n in part.inputs),
                    kwargs={},
                    outputs=tuple(self._slot(n) for n in part.outputs),
                    returns_tensor=False,
                    distinct=distinct,
                    nodes=tuple(node.name for node in part.nodes),
                )
            )
            done += 1
            self.options.report(done, num_pieces)
        return steps

    def _cut_step(self, cut: Cut) -> Step:
        node = cut.node
        returns_tensor = isinstance(node.meta["val"], torch.Tensor)
        if returns_tensor:
            outputs: tuple[int, ...] = (self._slot(node),)
        else:
            by_index = {int(n.args[1]): self._slot(n) for n in cut.unpacked}  # type: ignore[arg-type]
            outputs = tuple(by_index.get(i, -1) for i in range(len(node.meta["val"])))
        call = host_op(node.target) or node.target
        assert callable(call)
        return Step(
            kind="host" if cut.is_host else "split",
            name=node.name,
            call=call,
            args=tuple(self._argument(a) for a in node.args),
            kwargs={k: self._argument(v) for k, v in node.kwargs.items()},
            outputs=outputs,
            returns_tensor=returns_tensor,
            nodes=(node.name,),
        )

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return Size.of(node_value(argument)) if is_scalar(argument) else Ref(self._slot(argument))
        if isinstance(argument, list | tuple):
            return type(argument)(self._argument(a) for a in argument)
        return argument

    def _free_slots(self, steps: list[Step]) -> list[Step]:
        """Marks where each intermediate value dies, so that a run holds no more memory than eager does."""
        last_use: dict[int, int] = {}
        for index, step in enumerate(steps):
            for slot in (*step.outputs, *_refs((step.args, tuple(step.kwargs.values())))):
                last_use[slot] = index
        returned = set(_refs(tuple(self._argument(a) for a in self.graph.output_args)))
        kept = returned | {self.slots[n] for n in (*self.graph.placeholders, *self.graph.constants)}
        frees: list[list[int]] = [[] for _ in steps]
        for slot, index in last_use.items():
            if slot >= 0 and slot not in kept:
                frees[index].append(slot)
        return [replace(step, frees=tuple(f)) for step, f in zip(steps, frees, strict=True)]

    # --- symbols

    def _symbol_sources(self) -> list[tuple[str, int, int]]:
        """Where each symbol's value is read. A symbol that is not listed depends on data."""
        sources: dict[str, tuple[int, int]] = {}
        for index, node in enumerate(self.graph_inputs):
            value = node.meta["val"]
            if isinstance(value, torch.SymInt) and expression(value).is_Symbol:
                sources.setdefault(str(value.node.expr), (index, -1))
        for index, node in enumerate(self.graph_inputs):
            value = node.meta["val"]
            if isinstance(value, torch.Tensor):
                for dim, expr in enumerate(shape_exprs(value)):
                    if expr.is_Symbol:
                        sources.setdefault(str(expr), (index, dim))
        return [(symbol, index, dim) for symbol, (index, dim) in sources.items()]

    def _token_symbol(self) -> str | None:
        """The symbol in the leading size of the splitting ops' queries."""
        symbols = set()
        for part in self.graph.parts:
            if isinstance(part, Cut) and not part.is_host:
                query = part.node.args[0]
                assert isinstance(query, fx.Node)
                symbols.add(symbol_of(query.meta["val"].shape[0]))
        if len(symbols) > 1:
            raise CompileError(
                f"attention runs over different token counts ({sorted(map(str, symbols))}); expected "
                "one symbol in the leading size of every query"
            )
        return symbols.pop() if symbols else None

    # --- the region

    def _region_parts(self, region_start: int) -> list[Any]:
        return self.graph.parts[region_start:]

    def _region_inputs(self, region_start: int, token_symbol: str | None) -> tuple[RegionInput, ...]:
        made_inside: set[fx.Node] = set()
        read: dict[fx.Node, None] = {}
        segments: set[fx.Node] = set()
        orders: set[fx.Node] = set()
        for part in self._region_parts(region_start):
            if isinstance(part, Cut):
                made_inside.update((part.node, *part.unpacked))
                read.update((n, None) for n in part.node.all_input_nodes)
                if _VARLEN in str(part.node.target):
                    segments.add(part.node.args[3])  # type: ignore[arg-type]
            else:
                made_inside.update(part.nodes)
                read.update((n, None) for n in part.inputs)
                orders.update(n.args[1] for n in part.nodes if n.target is permute_rows)
        read.update((a, None) for a in self.graph.output_args if isinstance(a, fx.Node))
        fixed = {self.graph_inputs[i] for i in self.static_inputs} | {*self.graph.constants, self.num_rows}
        fixed.update(self.derived)
        return tuple(
            RegionInput(
                self.slots[node],
                _info(node),
                node in segments,
                padding.token_dim(node.meta["val"], token_symbol)
                if token_symbol and node not in segments
                else None,
                node in orders,
            )
            for node in read
            if node not in made_inside and node not in fixed and not is_scalar(node)
        )

    def _region_symbols(
        self, region_start: int, region_inputs: Sequence[RegionInput], token_symbol: str | None
    ) -> tuple[str, ...]:
        """The symbols that sizes and numbers inside the region use.

        Pieces get others as inputs too, for their compilers; those do not count.
        """
        values = [
            n.meta["val"]
            for part in self._region_parts(region_start)
            for node in ([part.node] if isinstance(part, Cut) else part.nodes)
            for n in (node, *(i for i in node.all_input_nodes if is_scalar(i)))
        ]
        used = {symbol for value in values for symbol in _symbols_in(value)}
        sizes = [size for entry in region_inputs if not entry.is_segments for size in entry.info.shape]
        used |= {symbol for size in sizes for symbol in size.symbols}
        return tuple(sorted(used - {token_symbol or ""}))

    def _prove(
        self,
        region_start: int,
        region_inputs: Sequence[RegionInput],
        token_symbol: str | None,
        accepts: Callable[[SymbolValues], bool],
    ) -> padding.PaddingReport:
        if token_symbol is None:
            return padding.PaddingReport((("graph", "no dimension of a splitting op's query is symbolic"),))
        nodes_by_slot = {slot: node for node, slot in self.slots.items()}
        seeds: dict[fx.Node, padding.State] = {}
        for entry in region_inputs:
            node = nodes_by_slot[entry.slot]
            if entry.is_segments:
                seeds[node] = padding.SEGMENTS
            else:
                seeds[node] = padding.SHARED if entry.token_dim is None else padding.Rows(entry.token_dim)
        nodes: list[fx.Node] = []
        for part in self._region_parts(region_start):
            nodes += [part.node, *part.unpacked] if isinstance(part, Cut) else list(part.nodes)
        return padding.analyse(nodes, seeds, token_symbol, accepts)


def _device(outputs: Iterable[Any]) -> torch.device:
    """The device of a graph's outputs; mixed devices are the capture's business to refuse."""
    for argument in outputs:
        value = node_value(argument) if isinstance(argument, fx.Node) else None
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device("cpu")


def _refs(argument: Any) -> list[int]:
    if isinstance(argument, Ref):
        return [argument.slot]
    if isinstance(argument, list | tuple):
        return [slot for a in argument for slot in _refs(a)]
    return []


def _symbols_in(value: Any) -> set[str]:
    """The symbols in a traced number, or in the sizes of a traced tensor or several."""
    if isinstance(value, list | tuple):
        return {symbol for v in value for symbol in _symbols_in(v)}
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return {str(s) for size in sizes if hasattr(size, "node") for s in size.node.expr.free_symbols}


def _info(node: fx.Node) -> TensorInfo:
    value = node.meta["val"]
    return TensorInfo(node.name, tuple(Size.of(s) for s in value.shape), value.dtype, value.device)


def _attribute(module: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    if not isinstance(value, torch.Tensor):
        raise CompileError(f"the graph holds {node.target}, a {type(value).__name__}; expected a tensor")
    return value


def _accepts(
    placeholders: Sequence[fx.Node], independent: str | None = None
) -> Callable[[SymbolValues], bool]:
    """Checks the guards on symbols: Dynamo does so on its own path, which ours bypasses.

    Dynamo lets symbols begin at 2. One that counts independent rows may be 1: a run of one row is the first
    row of a run of two.
    """
    shape_env = next(
        (n.meta["val"].fake_mode.shape_env for n in placeholders if hasattr(n.meta["val"], "fake_mode")), None
    )
    if shape_env is None:
        return lambda values: True
    bounds = {str(symbol): (bound.lower, bound.upper) for symbol, bound in shape_env.var_to_range.items()}
    if independent in bounds and bounds[independent][0] == 2:
        bounds[independent] = (1, bounds[independent][1])
    conditions = [Size(g.expr) for g in shape_env.guards if not g.expr.is_Boolean or g.expr.free_symbols]

    def accepts(values: SymbolValues) -> bool:
        within = all(
            bool(bounds[symbol][0] <= value) and bool(value <= bounds[symbol][1])
            for symbol, value in values.items()
            if symbol in bounds
        )
        return within and all(bool(c(values)) for c in conditions if set(c.symbols) <= values.keys())

    return accepts
