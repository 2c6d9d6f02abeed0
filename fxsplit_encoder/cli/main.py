"""The `encoder-cg` command and its verbs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, ParamSpec, get_args

from fxsplit_encoder.config import Packing
from fxsplit_encoder.errors import FxSplitError, MissingExtraError

try:
    import typer
except ModuleNotFoundError:
    raise MissingExtraError("encoder-cg", "cli") from None

_PROGRAM = "encoder-cg"
_MODEL = "A checkpoint, whole or its vision tower: a directory or a hub name."
_NAMES = "qwen3-vl-8b, internvl3-8b, deepseek-ocr, ... (a wrong one lists them all)"
_DEMO_MODEL = f"Whose tower, at its true width: {_NAMES}."
_INSPECTED = f"A name of the demo's ({_NAMES}), or a checkpoint: a directory or a hub name."
_CONFIG = "The budgets and how they are captured."
_DTYPE_HELP = "float32, bfloat16 or float16; auto: bfloat16 on CUDA, else float32."
_BLOCKS_HELP = "Depth of a tower with random weights, at most the model's own."
_PACKINGS = f"{', '.join(get_args(Packing))}."
_EXTRA_PACKAGES = {"PIL", "huggingface_hub", "rich", "safetensors", "tabulate", "transformers"}

app = typer.Typer(
    name=_PROGRAM,
    help="Fast vision encoders: FX graphs split at attention, CUDA graphs captured per token budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

P = ParamSpec("P")

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

DeviceOption = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N; auto: CUDA if there is a GPU.")
]
DtypeOption = Annotated[DtypeName, typer.Option("--dtype", metavar="DTYPE", help=_DTYPE_HELP)]
BlocksOption = Annotated[
    int | None, typer.Option("--blocks", min=1, metavar="N", help=_BLOCKS_HELP, show_default=False)
]


def _reporting(verb: Callable[P, None]) -> Callable[P, None]:
    """Errors raised on purpose become a line on stderr and exit code 2."""

    @functools.wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            verb(*args, **kwargs)
        except MissingExtraError:
            _fail(MissingExtraError(_PROGRAM, "cli"))  # which brings the packages of `hf`
        except FxSplitError as error:
            _fail(error)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in _EXTRA_PACKAGES:
                raise
            _fail(MissingExtraError(_PROGRAM, "cli"))

    return run


def _fail(error: FxSplitError) -> None:
    for line in str(error).splitlines():
        typer.echo(f"{_PROGRAM}: error: {line}", err=True)
    raise typer.Exit(2)


@app.command()
@_reporting
def demo(
    images: Annotated[
        list[Path] | None,
        typer.Option(
            "--images",
            metavar="PATH",
            help="An image, a clip, or a directory of them; may be repeated.",
            show_default="those in examples/",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="YAML",
            help=_CONFIG,
            show_default="configs/demo.yaml; a few whole tiles for a tower of tiles",
        ),
    ] = None,
    model: Annotated[str, typer.Option("--model", metavar="NAME", help=_DEMO_MODEL)] = "qwen3-vl-8b",
    blocks: BlocksOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Encode photographs and a clip with a model's vision tower, and compare with eager.

    The weights are random and the width is the true one; on a CPU there are fewer blocks. The exit code is 1
    if an output differs from eager's by more than rounding does.
    """
    import fxsplit_encoder as fx
    from fxsplit_encoder.cli.console import choose_device, choose_dtype
    from fxsplit_encoder.cli.demo import run_demo

    settings = fx.EncoderConfig.from_yaml(config) if config else None
    where = choose_device(device)
    if not run_demo(images or [], settings, blocks, where, choose_dtype(dtype, where), model):
        raise typer.Exit(1)


@app.command()
@_reporting
def encode(
    images: Annotated[
        list[Path],
        typer.Argument(
            metavar="IMAGES",
            help="Images, clips (animated WebP, GIF or APNG), or directories of them.",
            show_default=False,
        ),
    ],
    model: Annotated[str, typer.Option("--model", metavar="DIR_OR_NAME", help=_MODEL)],
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help="The safetensors file to write.")],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="YAML", help=_CONFIG, show_default="inferred budgets; on a CPU no captures"
        ),
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Encode images and clips to a safetensors file, one tensor per item.

    A tensor's key is the item's file name; the second file of a name gets NAME#2, the third NAME#3, in the
    order given. The metadata holds grid, tokens and kind of every item, the configuration, and the model.
    """
    import fxsplit_encoder as fx
    from fxsplit_encoder.cli.console import choose_device, choose_dtype
    from fxsplit_encoder.cli.encode import run_encode

    settings = fx.EncoderConfig.from_yaml(config) if config else None
    where = choose_device(device)
    run_encode(images, model, settings, output, where, choose_dtype(dtype, where))


@app.command()
@_reporting
def inspect(
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME_OR_DIR", help=_INSPECTED, show_default="qwen3-vl-8b"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="YAML", help=_CONFIG, show_default="inferred budgets"),
    ] = None,
    blocks: BlocksOption = None,
    capture: Annotated[
        bool, typer.Option("--capture", help="Capture too: modes, graphs, breaks and bytes of every budget.")
    ] = False,
    attention: Annotated[
        bool, typer.Option("--attention", help="The attention kernels: which work, which were chosen.")
    ] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Show how a tower is split at attention, which pieces may be padded, and its budgets."""
    import fxsplit_encoder as fx
    from fxsplit_encoder.cli.console import choose_device, choose_dtype
    from fxsplit_encoder.cli.inspection import find_tower, print_attention, print_captures, run_inspect

    settings = fx.EncoderConfig.from_yaml(config) if config else fx.EncoderConfig()
    where = choose_device(device)
    tower, family = find_tower(model, blocks, choose_dtype(dtype, where), where)
    run_inspect(tower, family, settings)
    if capture:
        print_captures(family.wrap(tower), settings)
    if attention:
        print_attention(where, settings)


@app.command()
@_reporting
def tune(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Requests as JSON lines.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="YAML", help="The configuration to write.")
    ],
    max_graphs: Annotated[
        int, typer.Option("--max-graphs", min=1, metavar="K", help="Budgets of each path, at most.")
    ],
    max_bytes: Annotated[
        str | None,
        typer.Option(
            "--max-bytes",
            metavar="SIZE",
            help="Device memory of all captures, at most, such as 2GiB; estimated.",
            show_default="no limit",
        ),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            "--costs",
            metavar="JSON",
            help="Measured milliseconds by output tokens, replay_ms and exact_ms.",
            show_default="estimated",
        ),
    ] = None,
    granularity: Annotated[
        int, typer.Option("--granularity", min=1, metavar="N", help="Budgets are multiples of N.")
    ] = 1,
    max_budget: Annotated[
        int | None,
        typer.Option(
            "--max-budget",
            min=1,
            metavar="N",
            help="Output tokens of the largest budget, at most; larger requests are cut.",
            show_default="the largest request",
        ),
    ] = None,
    packing: Annotated[
        Packing, typer.Option("--packing", metavar="NAME", help="How the manager will pack: " + _PACKINGS)
    ] = "cost",
) -> None:
    """Choose the token budgets that serve a trace of requests at the least cost.

    Prints what they would do, compared with powers of two, and writes a configuration.
    """
    from fxsplit_encoder.cli.tune import parse_bytes, run_tune
    from fxsplit_encoder.tuning import LadderLimits

    limit = parse_bytes(max_bytes) if max_bytes is not None else None
    limits = LadderLimits(max_graphs, limit, max_budget, granularity)
    run_tune(trace, output, limits, costs=costs, packing=packing)


if __name__ == "__main__":
    app()
