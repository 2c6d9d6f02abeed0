"""The configuration: one frozen model, read from YAML, from a mapping or from keyword arguments."""

import functools
import itertools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictInt, model_validator

from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.messages import name_of, shown
from fxsplit_encoder.settings_model import (
    MOST_PROBLEMS,
    Bytes,
    Settings,
    one_of,
    parse_bytes,
    read_settings,
    unknown_option,
)

Mode = Literal["auto", "full", "piecewise", "breakable", "exact", "none"]
Packing = Literal["cost", "greedy", "greedy_defer"]
PieceCompiler = Literal["auto", "inductor", "aot_eager", "eager"]
GraphPass = Literal[
    "folded_adapters",
    "conv_to_linear",
    "pad_mlp_width",
    "decomposed_bias",
    "dense_attention",
    "merged_projections",
    "wide_heads",
    "measured_activations",
    "gelu_epilogue",
    "output_branch",
]

MODES: tuple[Mode, ...] = get_args(Mode)
GRAPH_PASSES: tuple[GraphPass, ...] = get_args(GraphPass)

_OPERATOR = re.compile(r"\w+::\w+(\.\w+)?")

# Cumulative lengths are 32-bit integers.
_MOST = 2**31 - 1

_MOST_BUDGETS = 4096


def _check_kernels(value: object) -> object:
    """The form alone: which kernels and conditions there are is known to the operations."""
    for name in value.values() if isinstance(value, Mapping) else [value]:
        if not isinstance(name, str):
            raise ValueError("allowed: auto, a kernel's name, or a mapping of conditions to these")
    return value


def _check_budgets(budgets: tuple[int, ...], smallest: int = 1) -> tuple[int, ...]:
    for budget in budgets:
        if budget < smallest:
            wrong = "not positive" if smallest else "negative"
            raise ValueError(f"{shown(budget)} is {wrong}; allowed: integers of at least {smallest}")
        if budget > _MOST:
            raise ValueError(f"{shown(budget)} is more than cumulative lengths count; allowed: up to {_MOST}")
    for smaller, larger in itertools.pairwise(budgets):
        if smaller == larger:
            raise ValueError(f"{larger} is listed twice; allowed: each budget once")
        if smaller > larger:
            raise ValueError(f"{larger} follows {smaller}, unsorted; allowed: increasing order")
    return budgets


def _check_operator(name: str) -> str:
    if not _OPERATOR.fullmatch(name):
        raise ValueError("not an operator's name; allowed: namespace::name or namespace::name.overload")
    return name


def _check_passes(names: object) -> object:
    if isinstance(names, str) and names == "auto":
        return names
    if not isinstance(names, list | tuple | set | frozenset):
        raise ValueError(f"allowed: auto, or a list of: {', '.join(GRAPH_PASSES)}")
    names = tuple(names)
    for name in names:
        if not isinstance(name, str) or name not in GRAPH_PASSES:
            raise ValueError(
                f"no pass is called {shown(name)}; allowed: auto, or a list of: {', '.join(GRAPH_PASSES)}"
            )
        if names.count(name) > 1:
            raise ValueError(f"{name} is listed twice; allowed: each pass once")
    return names


def _listed(value: object) -> object:
    """A single budget as a list of one. Iterators are refused: they may not end."""
    if isinstance(value, int):
        return (value,)
    if not isinstance(value, list | tuple | range) or value[_MOST_BUDGETS:]:
        raise ValueError(f"allowed: an integer, or a list of at most {_MOST_BUDGETS}")
    return value


_Mode = Annotated[Mode, one_of(MODES)]
_Budgets = Annotated[tuple[StrictInt, ...], BeforeValidator(_listed), AfterValidator(_check_budgets)]
_PathBudgets = Annotated[
    tuple[StrictInt, ...],
    BeforeValidator(_listed),
    AfterValidator(functools.partial(_check_budgets, smallest=0)),
]
_Count = Annotated[int, Field(strict=True, ge=0, le=_MOST)]
_Priority = Annotated[int, Field(strict=True, ge=-3, le=0)]
_Number = Annotated[int, Field(strict=True, ge=1, le=_MOST)]


class PathConfig(Settings):
    """Settings of one encoder path, for example "global" or "local", that override the general ones."""

    token_budgets: _PathBudgets = ()
    """Output tokens of each captured budget of this path, increasing. 0 may come first on a path that batches
    without tokens there skip; alone, it means that nothing is captured. Empty: as for every path."""
    mode: _Mode | None = None
    """How this path is captured. None: as for every path."""


class EncoderConfig(Settings):
    """Settings of splitting, capturing and packing a vision encoder. Immutable, comparable and hashable.

    Raises:
        ConfigError: a key is unknown, a value is not allowed, or two values contradict each other.
    """

    enabled: StrictBool = True
    """Whether anything is captured. False: every item is encoded eagerly and counted as a miss."""
    token_budgets: _Budgets = ()
    """Output tokens of each captured budget, increasing, or a single one, for every path that does not list
    its own. Empty: powers of two times the smallest and the quarters between, over the tower's range."""
    max_items_per_batch: _Count = 0
    """Images and videos of one replay at most; not above the smallest budget. A tower's own forward may take
    more where that was measured to be quicker. 0: inferred from the tower's range."""
    max_frames_per_batch: _Count | None = None
    """Video frames of one replay at most. 0: images only. None: those of `max_items_per_batch` longest
    videos."""
    mode: _Mode = "auto"
    """What is captured. full: budgets, as one graph each; piecewise: budgets, broken at every splitting op;
    breakable: budgets of the untouched module, not compiled, broken there and wherever its code asks for it;
    exact: no budgets, but the token counts that occur, after `exact_min_hits` uses; none:
    nothing, all run at their exact shape; auto: what measures cheapest for each budget, and token counts for
    which padding has cost more than their own capture would."""
    exact_min_hits: _Number = 2
    """With `mode: exact`: how often a token count has to come before it is captured."""
    capture_recurring: StrictBool = True
    """With `mode: auto`: whether token counts get captures of their own while requests are served, once
    padding or launches have cost more than these. False: what `capture` made is all that there will be, and
    no request waits for a capture."""
    weight_check_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds between two checks of the addresses and versions of the parameters, and of the tower's modules
    (behind torch.compile of its blocks). A check takes about 0.1 microseconds a parameter, several times that
    out of cold processor caches. 0: before every replay. Above 0, outputs until the next check come from
    where parameters were, whose memory captures hold, and perhaps from the old form of those that passes keep
    in another, of which every replay compares samples (behind torch.compile every call all of it); `refresh`
    has the next replay check."""
    packing: Annotated[Packing, one_of(get_args(Packing))] = "cost"
    """How items are grouped into replays. cost: by the least sum of the measured costs of all replays and
    fallbacks; greedy: by ascending size, as many as fit the largest budget; greedy_defer: the same, but an
    item for which a batch would grow by more than its own budget starts the next one."""
    splitting_ops: tuple[Annotated[str, AfterValidator(_check_operator)], ...] = (
        "fxsplit::varlen_attention",
        "aten::scaled_dot_product_attention",
    )
    """Operators at which the FX graph is cut, as namespace::name or namespace::name.overload."""
    compile: StrictBool = True
    """Whether the tower's forward is traced, split and compiled. False: it is captured as it is, its
    attention inside (`full`) or between graphs (`breakable`, which `piecewise` is then, too)."""
    piece_compiler: Annotated[
        PieceCompiler | Callable[..., Any], one_of(get_args(PieceCompiler), or_callable=True)
    ] = "auto"
    """Compiler of the pieces between splitting ops. auto: inductor on CUDA, eager on a CPU. In Python, any
    callable that takes a graph module and its example inputs and returns a callable; not torch.compile, since
    Dynamo skips a frame for good if its first call is inside another compilation."""
    passes: Annotated[Literal["auto"] | tuple[GraphPass, ...], BeforeValidator(_check_passes)] = "auto"
    """Rewrites of the graph, a list of names (docs/passes.md). auto: those that were measured to pay on the
    device; on CUDA all, but `decomposed_bias` from compute capability 9.0 on and `measured_activations` on
    Hopper where quack-kernels is installed. `pad_mlp_width` and `wide_heads` take memory."""
    invariant: StrictBool = False
    """Whether an image or a video gets the same bits alone, in any batch, on any budget and on any rank: one
    algorithm a layer, however many rows it gets. A tower for which that cannot be kept is refused
    (docs/invariant.md)."""
    attention: Annotated[str | Mapping[str, str], BeforeValidator(_check_kernels)] = "auto"
    """The attention kernel. auto: for each class of shapes the fastest that was measured; a kernel's name:
    that one, wherever it can compute; or a mapping from conditions, such as tokens>4096, to these."""
    max_graph_bytes: Annotated[Bytes | None, BeforeValidator(parse_bytes)] = None
    """Device memory that all captures together may take, in bytes or as a size such as 4GiB or 4G. None: no
    limit but the device's."""
    stream_priority: _Priority = 0
    """Of the stream that graphs are captured on: their kernels keep it, whatever stream replays them. Below
    0, down to -3, they go before the work of streams of 0, such as an engine's on the same device."""
    data_parallel: StrictBool = False
    """Whether the items of a batch are shared among the ranks of a process group: every rank calls `execute`
    with the same inputs, encodes its share and returns all items."""
    start_file: Path | None = None
    """A file of `EncoderCudaGraphManager.save_start` or `encoder-cg build`, with which managers start without
    compiling and measuring. It holds compiled code: name one that you trust. One that is missing, damaged or
    made for something else is ignored, with a warning."""
    paths: Mapping[str, PathConfig] = Field(default_factory=dict)
    """Settings of single encoder paths, by the path's name."""
    debug: StrictBool = False
    """Whether capture rules are checked at every replay. Slow."""

    @model_validator(mode="after")
    def _compiles_what_needs_it(self) -> Self:
        if self.compile:
            return self
        problems = [
            f"{name}: applies to compiled pieces, and compile is false; allowed: auto; got "
            f"{shown(getattr(self, name))}"
            for name in ("piece_compiler", "passes")
            if getattr(self, name) != "auto"
        ]
        if problems:
            raise ConfigError(*problems)
        return self

    @model_validator(mode="after")
    def _invariant_can_be_kept(self) -> Self:
        if not self.invariant:
            return self
        modes = {"mode": self.mode, **{f"paths.{name}.mode": path.mode for name, path in self.paths.items()}}
        contradictions = {
            "enabled": (not self.enabled, "the tower's own code would run", "true"),
            "compile": (not self.compile, "the tower's own code would run", "true"),
            **{
                name: (mode == "breakable", "the tower's own code would run", "another mode")
                for name, mode in modes.items()
            },
            "piece_compiler": (callable(self.piece_compiler), "nothing is known of it", "a name"),
            "attention": (not isinstance(self.attention, str), "one kernel attends", "auto, or one kernel"),
        }
        problems = [
            f"{name}: contradicts invariant: {why}; allowed: {allowed}; got "
            f"{shown(modes.get(name, getattr(self, name, None)))}"
            for name, (contradicts, why, allowed) in contradictions.items()
            if contradicts
        ]
        if problems:
            raise ConfigError(*problems)
        return self

    @model_validator(mode="after")
    def _items_within_smallest_budget(self) -> Self:
        listed = {f"paths.{name}.token_budgets": path.token_budgets for name, path in self.paths.items()}
        for field, budgets in {"token_budgets": self.token_budgets, **listed}.items():
            smallest = next(filter(None, budgets), self.max_items_per_batch)
            if self.max_items_per_batch > smallest:
                raise ConfigError(
                    f"max_items_per_batch: above the smallest budget of {field}, so an item would have less "
                    f"than one token; allowed: 0 to {smallest}; got {self.max_items_per_batch}"
                )
        return self

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> Self:
        """The configuration in a YAML file, else ConfigError; an empty file gives the defaults."""
        try:
            return cls._from_mapping(read_settings(path))
        except ConfigError as error:
            raise ConfigError(*(f"{path!s}: {problem}" for problem in error.problems)) from None

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """The configuration in the `options` of `torch.compile(..., options=options)`, else ConfigError. The
        keys are this class's fields, and `config`, the path of a YAML file, a mapping or an `EncoderConfig`
        whose settings the others override.
        """
        allowed = ("config", *cls.model_fields)
        if unknown := [name for name in options if name not in allowed]:
            raise ConfigError(*(unknown_option(name, allowed) for name in unknown[:MOST_PROBLEMS]))
        overrides = dict(options)
        base = overrides.pop("config", {})
        if isinstance(base, (str, os.PathLike)):
            return cls.from_yaml(base).replace(**overrides)
        if isinstance(base, cls):
            return base.replace(**overrides)
        if isinstance(base, Mapping):
            return cls._from_mapping({**base, **overrides})
        raise ConfigError(
            f"config: allowed: a YAML file's path, a mapping or an EncoderConfig; got {shown(base)}"
        )

    def replace(self, **changes: Any) -> Self:
        """A copy with `changes`, validated as a whole; ConfigError for an unknown or wrong one."""
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, **changes})

    @classmethod
    def _from_mapping(cls, values: Mapping[Any, Any]) -> Self:
        return cls(**{name_of(name): value for name, value in values.items()})
