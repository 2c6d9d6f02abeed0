"""The options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

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
    typer.Option(
        "--blocks",
        min=1,
        metavar="N",
        help="Depth of a tower with random weights, at most the model's own.",
        show_default=False,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="YAML",
        help="The budgets and how they are captured: a file, or a name of those that are shipped.",
        show_default="inferred; of the demo few; of encode on a CPU none",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document in place of facts and tables.")]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Also write the JSON document there.", show_default=False
    ),
]
OutputFile = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.", show_default=False)
]
