"""The `encoder-cg` command and its verbs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fxsplit_encoder.cli.options import (
    MODEL,
    AsJson,
    Config,
    Form,
    Ladder,
    Model,
    OnRay,
    Place,
    Setup,
    complete_model,
    with_groups,
)
from fxsplit_encoder.cli.usage import PROGRAM, OneLineErrors, versions
from fxsplit_encoder.errors import InputError

if TYPE_CHECKING:
    import torch

_CHECKPOINT = "A checkpoint, whole or its vision tower: a directory or a hub name."
_IMAGES = "Images, clips (animated WebP, GIF or APNG), or directories of them."

app = typer.Typer(
    name=PROGRAM,
    cls=OneLineErrors,
    help="Fast vision encoders: FX graphs split at attention, CUDA graphs captured per token budget.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(versions())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show versions and exit."),
    ] = False,
) -> None:
    """Options of every command."""


@app.command()
@with_groups
def demo(
    place: Place,
    form: Form,
    setup: Setup,
    images: Annotated[
        list[Path] | None,
        typer.Option(
            "--images",
            metavar="PATH",
            help="An image, a clip, or a directory of them; may be repeated.",
            show_default="photographs and a clip that come with the package",
        ),
    ] = None,
    model: Model = "qwen3-vl-8b",
) -> None:
    """Encode photographs and a clip with a model's vision tower, and compare with eager.

    Shows what is captured, what a batch becomes, and that results agree; on a GPU, how long both take. On a
    CPU a tower with random weights has two blocks, unless `--blocks` says otherwise. The exit code is 1 if an
    output differs from eager's by more than rounding does.
    """
    from fxsplit_encoder.cli.demo import CPU_BLOCKS, run_demo
    from fxsplit_encoder.cli.document import Document
    from fxsplit_encoder.cli.files import check_output, read_config
    from fxsplit_encoder.cli.tower import choose_tower, is_checkpoint

    check_output(form.output)
    settings = read_config(setup.config)
    device, dtype = _placed(place)
    blocks = setup.blocks
    if blocks is None and device.type == "cpu" and not is_checkpoint(model):
        blocks = CPU_BLOCKS
    document = Document(form.as_json, form.output)
    agree = run_demo(choose_tower(model, blocks, device, dtype), images or [], settings, document)
    document.finish()
    if not agree:
        raise typer.Exit(1)


@app.command()
@with_groups
def encode(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGES", help=_IMAGES, show_default=False)],
    model: Annotated[str, typer.Option("--model", metavar="DIR_OR_NAME", help=_CHECKPOINT)],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The safetensors file to write; with --ray, Parquet."
        ),
    ],
    place: Place,
    cluster: OnRay,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Encode images and clips to a safetensors file, one tensor per item; with --ray, images to Parquet.

    A tensor's key is the item's file name; the second file of a name gets NAME#2, the third NAME#3, in the
    order given. The metadata holds grid, tokens and kind of every item, the configuration, and the model.
    """
    from fxsplit_encoder.cli.document import Document
    from fxsplit_encoder.cli.encode import run_encode
    from fxsplit_encoder.cli.files import check_output, read_config

    document = Document(as_json)
    if cluster.ray:
        from fxsplit_encoder.cli.encode_ray import run_encode_ray

        run_encode_ray(images, model, read_config(config), output, place, cluster, document)
        document.finish()
        return
    check_output(output)
    run_encode(images, model, read_config(config), output, _placed(place), document)
    document.finish()


@app.command()
@with_groups
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_CHECKPOINT, show_default=False)],
    place: Place,
    host: Annotated[str, typer.Option("--host", help="The address to bind; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The port to bind.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar="ENCODER_CG_API_KEY",
            help="What clients have to send as a bearer token.",
            show_default="none is asked for",
        ),
    ] = None,
    pooling: Annotated[
        Literal["model", "mean", "none"] | None,
        typer.Option(
            "--pooling",
            metavar="NAME",
            help="model: its own vector; mean: of its rows; none: a row a token.",
            show_default="model, or mean where it has none",
        ),
    ] = None,
    config: Config = None,
    settings: Annotated[
        Path | None,
        typer.Option(
            "--settings", metavar="YAML", help="Limits and timeouts: ServiceSettings.", show_default=False
        ),
    ] = None,
) -> None:
    """Answer requests for embeddings of images and texts over HTTP, as OpenAI's clients send them.

    One process, an encoder on each GPU, or on the CPU. SIGTERM and Ctrl+C end it once requests in flight are
    answered.
    """
    from fxsplit_encoder.cli.files import read_config
    from fxsplit_encoder.cli.serve import run_serve

    given = {"api_key": api_key, "pooling": pooling, "config": read_config(config), **vars(place)}
    run_serve(model, host, port, given, settings)


@app.command()
@with_groups
def inspect(
    place: Place,
    form: Form,
    setup: Setup,
    model: Model = "qwen3-vl-8b",
    capture: Annotated[
        bool, typer.Option("--capture", help="Capture too: modes, graphs, breaks and bytes of every budget.")
    ] = False,
    attention: Annotated[
        bool,
        typer.Option(
            "--attention",
            help="The kernels of attention and of linear layers: which work, which were chosen.",
        ),
    ] = False,
) -> None:
    """Show how a tower is split at attention, which pieces may be padded, and its budgets.

    Of a checkpoint of transformers first its towers: which `fx.accelerate` serves, and why not the others.
    """
    import fxsplit_encoder as fx
    from fxsplit_encoder.cli.document import Document
    from fxsplit_encoder.cli.files import check_output, read_config
    from fxsplit_encoder.cli.inspection import run_inspect, say_captures, say_kernels, say_towers
    from fxsplit_encoder.cli.tower import check_blocks, choose_tower, is_checkpoint, locate

    check_output(form.output)
    check_blocks(model, setup.blocks)
    settings = read_config(setup.config) or fx.EncoderConfig()
    device, dtype = _placed(place)
    document = Document(form.as_json, form.output)
    if is_checkpoint(model) and not say_towers(locate(model), document):
        document.finish()
        return
    chosen = choose_tower(model, setup.blocks, device, dtype)
    run_inspect(chosen.module, chosen.family, settings, document)
    if capture:
        say_captures(chosen.family.wrap(chosen.module), settings, document)
    if attention:
        say_kernels(device, settings, document)
    document.finish()


@app.command()
@with_groups
def build(
    place: Place,
    setup: Setup,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="The file to write.", show_default=False),
    ],
    model: Model = "qwen3-vl-8b",
    as_json: AsJson = False,
) -> None:
    """Compile, measure and choose once, for every process that serves this tower on a GPU of this kind.

    They name the file as `start_file` in their configuration, or give it to `manager.load_start`. It is for
    this GPU, these versions, this tower and this configuration; with others it is ignored, with a warning.
    """
    import fxsplit_encoder as fx
    from fxsplit_encoder.cli.build import run_build
    from fxsplit_encoder.cli.document import Document
    from fxsplit_encoder.cli.files import check_output, read_config
    from fxsplit_encoder.cli.tower import choose_tower

    check_output(output)
    settings = read_config(setup.config) or fx.EncoderConfig()
    device, dtype = _placed(place)
    document = Document(as_json)
    run_build(choose_tower(model, setup.blocks, device, dtype), settings, device, output, document)
    document.finish()


@app.command()
@with_groups
def bench(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=MODEL, autocompletion=complete_model, show_default=False)
    ],
    place: Place,
    setup: Setup,
    images: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[IMAGES]", help=_IMAGES, show_default="photographs and a clip that come with the package"
        ),
    ] = None,
    ways: Annotated[
        str, typer.Option("--ways", metavar="LIST", help="Those to compare.")
    ] = "eager,graph,ours,reduce-overhead",
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the plot (.png) or the numbers (.json) there; may be repeated.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what this GPU would gain with your images: eager, CUDA graph, reduce-overhead, ours.

    Each size alone, at most six, and everything in one request. Outputs are compared with eager's first. The
    others get what follows from the sizes prepared beforehand, ours computes it within the time.
    """
    from fxsplit_encoder.cli.bench import run_bench
    from fxsplit_encoder.cli.document import Document
    from fxsplit_encoder.cli.files import check_output, read_config
    from fxsplit_encoder.cli.tower import choose_tower
    from fxsplit_encoder.cli.ways import check_ways

    for file in output or []:
        check_output(file, ".png", ".json")
    chosen_ways = check_ways(ways)
    config = read_config(setup.config)
    device, dtype = _placed(place)
    if device.type != "cuda" and place.device == "auto":
        raise InputError(
            "bench measures what a GPU gains, and there is none here; encoder-cg demo shows what would be "
            "captured, and --device cpu times the CPU all the same"
        )
    files = {ending: [file for file in output or [] if file.suffix == ending] for ending in (".png", ".json")}
    document = Document(as_json, *files[".json"])
    chosen = choose_tower(model, setup.blocks, device, dtype)
    run_bench(chosen, images or [], config, chosen_ways, files[".png"], document)
    document.finish()


@app.command()
@with_groups
def tune(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="Requests as JSON lines, best those of EncoderCudaGraphManager.record_trace.",
            show_default=False,
        ),
    ],
    ladder: Ladder,
    place: Place,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="YAML", help="The configuration to write.", show_default="it is printed"
        ),
    ] = None,
    as_json: AsJson = False,
    costs: Annotated[
        Path | None,
        typer.Option(
            "--costs",
            metavar="JSON",
            help="Milliseconds by output tokens, replay_ms and exact_ms; with --model the file to write.",
            show_default="those that the trace holds",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Measure the costs of this tower on this GPU first, and write them.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Choose the token budgets that serve a trace of requests at the least cost.

    Only budgets that `mode: auto` will keep are proposed. Prints what they would do, compared with those that
    the recorded run captured or with the default ladder, says whether there is something to gain, and writes
    a configuration.
    """
    from fxsplit_encoder.cli.document import Document
    from fxsplit_encoder.cli.files import check_output
    from fxsplit_encoder.cli.tune import find_costs, measure_costs, parse_bytes, run_tune
    from fxsplit_encoder.tuning import LadderLimits

    check_output(output)
    limit = parse_bytes(ladder.max_bytes) if ladder.max_bytes is not None else None
    limits = LadderLimits(ladder.max_graphs, limit, ladder.max_budget, ladder.granularity)
    document = Document(as_json)
    if model is not None:
        from fxsplit_encoder.cli.tower import choose_tower

        costs = costs or trace.with_suffix(".costs.json")
        check_output(costs, option="--costs")
        measure_costs(choose_tower(model, None, *_placed(place)), costs)
    run_tune(trace, output, limits, find_costs(trace, costs), ladder.packing, document)
    document.finish()


@app.command()
@with_groups
def report(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="A run that EncoderCudaGraphManager.record_trace or Connector.record wrote.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="HTML", help="The page to write.", show_default="TRACE with .html"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a recorded run comes to: budgets, padding, misses by reason, where time goes.

    Prints tables, and writes one HTML page that needs no other file. Needs no GPU.
    """
    from fxsplit_encoder.cli.document import Document
    from fxsplit_encoder.cli.files import check_output
    from fxsplit_encoder.cli.report import run_report

    output = output or trace.with_suffix(".html")
    check_output(output, ".html")
    document = Document(as_json)
    run_report(trace, output, document)
    document.finish()


def _placed(place: Place) -> tuple[torch.device, torch.dtype]:
    from fxsplit_encoder.cli.console import choose_device
    from fxsplit_encoder.models.load import dtype_of

    device = choose_device(place.device)
    return device, dtype_of(place.dtype, device)


if __name__ == "__main__":
    app()
