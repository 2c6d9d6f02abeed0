"""The `encoder-cg` command and its verbs. What needs torch is imported by the verb that runs.

Errors of the parser, the library and Python are lines on stderr, with exit code 2.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from typer.core import TyperGroup

from fxsplit_encoder import __version__
from fxsplit_encoder.cli.document import Document, check_output, read_config
from fxsplit_encoder.errors import FxSplitError, InputError, MissingExtraError

PROGRAM = "encoder-cg"
_EXTRA_PACKAGES = {"PIL", "huggingface_hub", "jinja2", "rich", "safetensors", "transformers"}


class OneLineErrors(TyperGroup):
    """A group of commands that says in a line what is wrong; typer draws a box, Python a traceback."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **options: Any) -> Any:
        """Runs a command line and exits: 0 for success, 1 where outputs differ, 2 for a mistake."""
        arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
        options.update(prog_name=PROGRAM, standalone_mode=False)
        try:
            code = super().main(arguments, **options)
        except typer.Abort:
            code = 1
        except Exception as error:
            lines = _lines_of(error)
            if not lines:
                raise
            for line in lines:
                typer.echo(f"{PROGRAM}: error: {line}", err=True)
            code = 2
        sys.exit(code if isinstance(code, int) else 0)


def _lines_of(error: Exception) -> list[str]:
    """Returns the lines of an error for the user; none: it is a bug of this package."""
    if isinstance(error, MissingExtraError) and error.extra not in ("ray", "serve"):
        return [str(MissingExtraError(PROGRAM, "cli"))]  # which brings the packages of `hf`
    if isinstance(error, FxSplitError | OSError):  # the latter of what is written, such as a full disk
        return str(error).splitlines()
    if hasattr(error, "format_message"):  # of the parser, whose base class moves between typer's versions
        return [" ".join(error.format_message().replace("Value error, ", "").split())]
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in _EXTRA_PACKAGES:
        return [str(MissingExtraError(PROGRAM, "cli"))]
    if type(error).__name__ == "OutOfMemoryError":
        return ["out of memory on the device; give it smaller images, fewer blocks, or list fewer budgets"]
    return []


def versions() -> str:
    """This command's, and those of what it runs on, in one line."""
    found = [f"{PROGRAM} {__version__}"]
    for package in ("torch", "transformers"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join([*found, f"Python {platform.python_version()}"])


# --- options that several commands share

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

MODEL = (
    "A tower with random weights at its true width: qwen3-vl-8b, internvl3-8b, deepseek-ocr, ... (a wrong "
    "name lists them all). Or a checkpoint: a directory or a hub name."
)
CHECKPOINT = "A checkpoint, whole or its vision tower: a directory or a hub name."
IMAGES = "Images, clips (animated WebP, GIF or APNG), or directories of them."
EXAMPLES = "photographs and a clip that come with the package"

MODELS = (
    *("qwen3-vl-8b", "qwen3.5-9b", "qwen3.5-27b", "qwen2.5-vl-3b", "qwen2.5-vl-7b", "qwen2-vl-2b"),
    *("qwen2-vl-7b", "glm-4.1v-9b", "glm-4.6v", "kimi-vl-a3b", "kimi-k2.5", "internvl3-8b", "internvl3-38b"),
    *("llama4", "deepseek-ocr", "step3-vl", "step3p7", "siglip-so400m-384", "clip-l-336", "dinov2-l-518"),
)
"""The names that `--model` takes beside checkpoints; here, so that a shell can complete them at once."""


def complete_model(incomplete: str) -> list[str]:
    """The models whose name begins so."""
    return [name for name in MODELS if name.startswith(incomplete)]


# Typer 0.27.0 takes a metavar that is the parameter in capitals for the option's name: those have one.
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda, cuda:N; auto: CUDA if there is a GPU.")
]
Dtype = Annotated[
    DtypeName,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help=f"{', '.join(get_args(DtypeName)[1:])}; auto: bfloat16 on CUDA, else float32.",
    ),
]
Model = Annotated[str, typer.Option("--model", metavar="MODEL", help=MODEL, autocompletion=complete_model)]
Blocks = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Depth of a tower with random weights, at most the model's own."),
]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="YAML",
        help="The budgets and how they are captured: a file, or a name of those that are shipped.",
        show_default="inferred; of the demo few; of encode on a CPU none",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document in place of facts and tables.")]
JsonFile = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Also write the JSON document there.")
]
OutputFile = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")]


# --- the commands

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
def demo(
    images: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="An image, a clip, or a directory of them; may be repeated.",
            show_default=EXAMPLES,
        ),
    ] = None,
    model: Model = "qwen3-vl-8b",
    blocks: Blocks = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    config: Config = None,
    as_json: AsJson = False,
    output: JsonFile = None,
) -> None:
    """Encode photographs and a clip with a model's vision tower, and compare with eager.

    Shows what is captured, what a batch becomes, and that results agree; on a GPU, how long both take. On a
    CPU a tower with random weights has two blocks, unless `--blocks` says otherwise. The exit code is 1 if an
    output differs from eager's by more than rounding does.
    """
    from fxsplit_encoder.cli.demo import CPU_BLOCKS, run_demo
    from fxsplit_encoder.cli.tower import choose_device, choose_tower, is_checkpoint

    with Document(as_json, output) as document:
        settings = read_config(config)
        if blocks is None and not is_checkpoint(model) and choose_device(device).type == "cpu":
            blocks = CPU_BLOCKS
        agree = run_demo(choose_tower(model, blocks, device, dtype), images or [], settings, document)
    if not agree:
        raise typer.Exit(1)


@app.command()
def encode(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGES", help=IMAGES)],
    model: Annotated[str, typer.Option(metavar="DIR_OR_NAME", help=CHECKPOINT)],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The safetensors file to write; with --ray, Parquet."
        ),
    ],
    device: Device = "auto",
    dtype: Dtype = "auto",
    config: Config = None,
    as_json: AsJson = False,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Any number of images, on the cluster of RAY_ADDRESS or this machine, to Parquet."
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="With --ray: processes that encode.",
            show_default="one a GPU; without GPUs, one for two CPUs",
        ),
    ] = None,
    shard_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="With --ray: images that are encoded and written as one.")
    ] = 128,
    pooling: Annotated[
        Literal["none", "mean", "model"],
        typer.Option(
            metavar="NAME",
            help="With --ray: none: a row a token; mean: the mean of these; model: the model's own vector.",
        ),
    ] = "none",
) -> None:
    """Encode images and clips to a safetensors file, one tensor per item; with --ray, images to Parquet.

    A tensor's key is the item's file name; the second file of a name gets NAME#2, the third NAME#3, in the
    order given. The metadata holds grid, tokens and kind of every item, the configuration, and the model.
    """
    from fxsplit_encoder.cli.encode import run_encode, run_encode_ray
    from fxsplit_encoder.cli.tower import checkpoint_tower

    with Document(as_json) as document:
        if ray:
            given = {"config": read_config(config), "device": device, "dtype": dtype, "pooling": pooling}
            run_encode_ray(images, output, document, model, shard_size, workers, given)
            return
        check_output(output)
        settings = read_config(config)
        run_encode(images, checkpoint_tower(model, device, dtype), settings, output, document)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=CHECKPOINT)],
    device: Device = "auto",
    dtype: Dtype = "auto",
    host: Annotated[str, typer.Option(help="The address to bind; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to bind.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="ENCODER_CG_API_KEY",
            help="What clients have to send as a bearer token.",
            show_default="none is asked for",
        ),
    ] = None,
    pooling: Annotated[
        Literal["model", "mean", "none"] | None,
        typer.Option(
            metavar="NAME",
            help="model: its own vector; mean: of its rows; none: a row a token.",
            show_default="model, or mean where it has none",
        ),
    ] = None,
    config: Config = None,
    settings: Annotated[
        Path | None, typer.Option(metavar="YAML", help="Limits and timeouts: ServiceSettings.")
    ] = None,
) -> None:
    """Answer requests for embeddings of images and texts over HTTP, as OpenAI's clients send them.

    One process, an encoder on each GPU, or on the CPU. SIGTERM and Ctrl+C end it once requests in flight are
    answered.
    """
    from fxsplit_encoder.cli.serve import run_serve

    given = {"api_key": api_key, "pooling": pooling, "config": read_config(config)}
    run_serve(model, host, port, {**given, "device": device, "dtype": dtype}, settings)


@app.command()
def inspect(
    model: Model = "qwen3-vl-8b",
    blocks: Blocks = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    config: Config = None,
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
    as_json: AsJson = False,
    output: JsonFile = None,
) -> None:
    """Show how a tower is split at attention, which pieces may be padded, and its budgets.

    Of a checkpoint of transformers first its towers: which `fx.accelerate` serves, and why not the others.
    """
    import fxsplit_encoder as fx
    from fxsplit_encoder.cli.inspection import run_inspect, say_captures, say_kernels, say_towers
    from fxsplit_encoder.cli.tower import choose_tower, is_checkpoint, locate

    with Document(as_json, output) as document:
        settings = read_config(config) or fx.EncoderConfig()
        if blocks is None and is_checkpoint(model) and not say_towers(locate(model), document):
            return
        chosen = choose_tower(model, blocks, device, dtype)
        run_inspect(chosen.module, chosen.family, settings, document)
        if capture:
            say_captures(chosen.family.wrap(chosen.module), settings, document)
        if attention:
            say_kernels(chosen.device, settings, document)


@app.command()
def build(
    output: OutputFile,
    model: Model = "qwen3-vl-8b",
    blocks: Blocks = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Compile, measure and choose once, for every process that serves this tower on a GPU of this kind.

    They name the file as `start_file` in their configuration, or give it to `manager.load_start`. It is for
    this GPU, these versions, this tower and this configuration; with others it is ignored, with a warning.
    """
    import fxsplit_encoder as fx
    from fxsplit_encoder.cli.encode import run_build
    from fxsplit_encoder.cli.tower import choose_tower

    check_output(output)
    with Document(as_json) as document:
        settings = read_config(config) or fx.EncoderConfig()
        run_build(choose_tower(model, blocks, device, dtype), settings, output, document)


@app.command()
def bench(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL, autocompletion=complete_model)],
    images: Annotated[
        list[Path] | None, typer.Argument(metavar="[IMAGES]", help=IMAGES, show_default=EXAMPLES)
    ] = None,
    blocks: Blocks = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    config: Config = None,
    ways: Annotated[
        str, typer.Option(metavar="LIST", help="Those to compare.")
    ] = "eager,graph,ours,reduce-overhead",
    as_json: AsJson = False,
    output: JsonFile = None,
) -> None:
    """Measure what this GPU would gain with your images: eager, CUDA graph, reduce-overhead, ours.

    Each size alone, at most six, and everything in one request. Outputs are compared with eager's first. The
    others get what follows from the sizes prepared beforehand, ours computes it within the time.
    """
    from fxsplit_encoder.cli.bench import run_bench
    from fxsplit_encoder.cli.tower import choose_tower
    from fxsplit_encoder.cli.ways import check_ways

    with Document(as_json, output) as document:
        chosen_ways, settings = check_ways(ways), read_config(config)
        chosen = choose_tower(model, blocks, device, dtype)
        if chosen.device.type != "cuda" and device == "auto":
            raise InputError(
                "bench measures what a GPU gains, and there is none here; encoder-cg demo shows what would "
                "be captured, and --device cpu times the CPU all the same"
            )
        run_bench(chosen, images or [], settings, chosen_ways, document)


@app.command()
def tune(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="Requests as JSON lines, best those of EncoderCudaGraphManager.record_trace.",
        ),
    ],
    max_graphs: Annotated[int, typer.Option(min=1, metavar="K", help="Budgets of each path, at most.")] = 16,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Device memory of all captures, at most, such as 2GiB or 2G; estimated.",
            show_default="no limit",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Measure the costs of this tower on this GPU first.",
            autocompletion=complete_model,
            show_default="the costs that the trace holds",
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="YAML", help="The configuration to write.", show_default="it is printed"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Choose the token budgets that serve a trace of requests at the least cost.

    Only budgets that `mode: auto` will keep are proposed. Prints what they would do, compared with those that
    the recorded run captured or with the default ladder, says whether there is something to gain, and writes
    a configuration.
    """
    from fxsplit_encoder.cli.tune import measure_costs, parse_bytes, run_tune
    from fxsplit_encoder.tuning import LadderLimits

    check_output(output)
    limits = LadderLimits(max_graphs, None if max_bytes is None else parse_bytes(max_bytes))
    measured = None
    if model is not None:
        from fxsplit_encoder.cli.tower import choose_tower

        measured = measure_costs(choose_tower(model, None, device, dtype))
    with Document(as_json) as document:
        run_tune(trace, output, limits, measured, document)


@app.command()
def report(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A run that EncoderCudaGraphManager.record_trace wrote.")
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
    from fxsplit_encoder.cli.report import run_report

    output = output or trace.with_suffix(".html")
    check_output(output, ".html")
    with Document(as_json) as document:
        run_report(trace, output, document)


if __name__ == "__main__":
    app()
