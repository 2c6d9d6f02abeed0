"""The options of `encode --ray`; without Ray, which is imported when it is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer


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
        Literal["none", "mean"],
        typer.Option(
            "--pooling", metavar="NAME", help="With --ray: none: a row a token; mean: the mean of these."
        ),
    ] = "none"
