"""The options that several commands share, in groups."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

from fxsplit_encoder.config import Packing

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

MODEL = (
    "A tower with random weights at its true width: qwen3-vl-8b, internvl3-8b, deepseek-ocr, ... (a wrong "
    "name lists them all). Or a checkpoint: a directory or a hub name."
)
CONFIG = "The budgets and how they are captured: a file, or a name of those that are shipped."

MODELS = (
    *("qwen3-vl-8b", "qwen3.5-9b", "qwen3.5-27b", "qwen2.5-vl-3b", "qwen2.5-vl-7b", "qwen2-vl-2b"),
    *("qwen2-vl-7b", "glm-4.1v-9b", "glm-4.6v", "kimi-vl-a3b", "kimi-k2.5", "internvl3-8b", "internvl3-38b"),
    *("llama4", "deepseek-ocr", "step3-vl", "step3p7", "siglip-so400m-384", "clip-l-336", "dinov2-l-518"),
)
"""The names that `--model` takes beside checkpoints; here, so that a shell can complete them at once."""


def complete_model(incomplete: str) -> list[str]:
    """The models whose name begins so."""
    return [name for name in MODELS if name.startswith(incomplete)]


@dataclass(frozen=True)
class Place:
    """Where a tower computes, and in what."""

    device: Annotated[
        str,
        typer.Option("--device", metavar="DEVICE", help="cpu, cuda, cuda:N; auto: CUDA if there is a GPU."),
    ] = "auto"
    dtype: Annotated[
        DtypeName,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help=f"{', '.join(get_args(DtypeName)[1:])}; auto: bfloat16 on CUDA, else float32.",
        ),
    ] = "auto"


Model = Annotated[str, typer.Option("--model", metavar="MODEL", help=MODEL, autocompletion=complete_model)]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="YAML", help=CONFIG, show_default="inferred budgets; on a CPU no captures"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document in place of facts and tables.")]


@dataclass(frozen=True)
class Form:
    """Output format of a command."""

    as_json: AsJson = False
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Also write the JSON document there.", show_default=False
        ),
    ] = None


@dataclass(frozen=True)
class Ladder:
    """Limits of proposed budgets."""

    max_graphs: Annotated[
        int, typer.Option("--max-graphs", min=1, metavar="K", help="Budgets of each path, at most.")
    ] = 16
    max_bytes: Annotated[
        str | None,
        typer.Option(
            "--max-bytes",
            metavar="SIZE",
            help="Device memory of all captures, at most, such as 2GiB or 2G; estimated.",
            show_default="no limit",
        ),
    ] = None
    granularity: Annotated[
        int, typer.Option("--granularity", min=1, metavar="N", help="Budgets are multiples of N.")
    ] = 1
    max_budget: Annotated[
        int | None,
        typer.Option(
            "--max-budget",
            min=1,
            metavar="N",
            help="Output tokens of the largest budget, at most; larger requests are cut.",
            show_default="the largest request",
        ),
    ] = None
    packing: Annotated[
        Packing,
        typer.Option(
            "--packing", metavar="NAME", help=f"How the manager will pack: {', '.join(get_args(Packing))}."
        ),
    ] = "cost"


@dataclass(frozen=True)
class Setup:
    """Options of building and capturing a tower."""

    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="YAML", help=CONFIG, show_default="inferred; of the demo few"),
    ] = None
    blocks: Annotated[
        int | None,
        typer.Option(
            "--blocks",
            min=1,
            metavar="N",
            help="Depth of a tower with random weights, at most the model's own.",
            show_default=False,
        ),
    ] = None


def with_groups(verb: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters that are dataclasses of options become these options."""
    parameters = inspect.signature(verb, eval_str=True).parameters
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in parameters.items()
        if dataclasses.is_dataclass(parameter.annotation)
    }
    options: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        if name in groups:
            options += _options(groups[name])
        else:
            options.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(verb)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            own = {field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            values[name] = group(**own)
        verb(**values)

    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _options(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
    ]


@dataclass(frozen=True)
class OnRay:
    """Whether a cluster encodes, and how."""

    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Any number of images, on the cluster of RAY_ADDRESS or this machine, to Parquet."
        ),
    ] = False
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            metavar="N",
            help="With --ray: processes that encode.",
            show_default="one a GPU; without GPUs, one for two CPUs",
        ),
    ] = None
    shard_size: Annotated[
        int,
        typer.Option(
            "--shard-size", min=1, metavar="N", help="With --ray: images that are encoded and written as one."
        ),
    ] = 128
    pooling: Annotated[
        Literal["none", "mean", "model"],
        typer.Option(
            "--pooling",
            metavar="NAME",
            help="With --ray: none: a row a token; mean: the mean of these; model: the model's own vector.",
        ),
    ] = "none"
