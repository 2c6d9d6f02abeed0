"""What graph passes, compiler settings and kinds of matrix product gain, in the Qwen3-VL-8B vision tower.

    python benchmarks/passes.py --output benchmarks/results/passes_h200.json

27 blocks, 1152 wide, bf16, seeded random weights. "Replays": milliseconds of one full graph replay at 196,
784, 3136 and 7056 patches, a row for each candidate: "default", what `passes: auto` is on CUDA; every pass
alone; fp8; and settings of Inductor beside the default passes. "persistent rows off" lacks
`_torch.inductor.persistent_rows`; "a version for each size" has every size compiled for itself.
"Products": microseconds of the four linear layers of a block, by several ways, with TFLOP/s and GB/s; on a
GPU twenty calls in one CUDA graph. Errors are `relative_rms` against float32; "default" has that of bf16.

A candidate that fails has its error in the table; the others go on. The file is written after every row. On
an H200 everything takes more than ten minutes, so `--only` takes some candidates, each by a part of its name,
and `--no-replays` none. `--small` runs a tiny tower, on a CPU too.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()

import torch
from environment import describe
from matrix_products import blas_library, ways
from narrow_tower import HIDDEN, MLP, narrow_tower
from storage import make_parser, one_line, store
from tables import passes as tables
from timing import captured_ms, device_ms
from torch import Tensor
from torch._inductor.choices import InductorChoices
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

import fxsplit_encoder as fx
from fxsplit_encoder.capture.forward import measure_ms
from fxsplit_encoder.compile.passes import DEFAULT_PASSES, PASSES, relative_rms
from fxsplit_encoder.compile.pieces import compile_inductor
from fxsplit_encoder.models.random import demo_tower

PATCHES = (196, 784, 3136, 7056)
ROWS = (196, 256, 784, 1024, 3136)
SMALL_PATCHES = SMALL_ROWS = (16, 64)
LAYERS = {"qkv": (1152, 3456), "proj": (1152, 1152), "fc1": (1152, 4304), "fc2": (4304, 1152)}
SMALL_LAYERS = {"fc1": (HIDDEN, MLP), "fc2": (MLP, HIDDEN)}
PADDED = {4304: 4352, MLP: 128}


class OwnChoices(InductorChoices):
    """Inductor's heuristics as they are: `persistent_rows` leaves the choices of a caller alone."""


def inductor(**settings: Any) -> Callable[..., Any]:
    """A piece compiler: Inductor with other settings, past its caches."""

    def compile_piece(module: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        with torch._inductor.config.patch(fx_graph_cache=False, **settings):
            return compile_inductor(module, inputs)

    return compile_piece


def without_persistent_rows(module: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A piece compiler: Inductor with its own limit of the rows that stay in registers."""
    with V.set_choices_handler(OwnChoices()):
        return inductor()(module, inputs)


def for_each_size(**settings: Any) -> Callable[..., Any]:
    """A piece compiler that makes a version of its own for every budget, when it is warmed up.

    Not by torch.compile: the first call comes inside of the tower's trace, where Dynamo skips its frames, for
    good.
    """
    compile_version = inductor(**settings)

    def compile_piece(module: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        versions: dict[Any, Callable[..., Any]] = {}

        def call(*args: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            sizes = tuple((*arg.shape, *arg.stride()) if isinstance(arg, Tensor) else arg for arg in args)
            if sizes not in versions:

                def fixed(*tensors: Any) -> Any:
                    rest = iter(tensors)
                    return module(*(next(rest) if isinstance(arg, Tensor) else arg for arg in args))

                with _disable_current_modes():
                    mode = FakeTensorMode()
                    fake = [mode.from_tensor(tensor, static_shapes=True) for tensor in tensors]
                    versions[sizes] = compile_version(fixed, fake)
            return versions[sizes](*tensors)

        return call

    return compile_piece


@dataclass(frozen=True)
class Candidate:
    settings: dict[str, Any] = field(default_factory=dict)
    around: Callable[[], Any] = contextlib.nullcontext


AUTOTUNE = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"}


def candidates(*, small: bool) -> dict[str, Candidate]:
    default = DEFAULT_PASSES["cuda"]
    exact = {"default": Candidate({"passes": default}), "no passes": Candidate({"passes": ()})}
    alone = {name: tuple(dict.fromkeys(("conv_to_linear", name))) for name in PASSES}
    exact |= {f"pass {name}": Candidate({"passes": names}) for name, names in alone.items()}
    exact["fp8"] = Candidate({"precision": "fp8", "passes": default})
    if small:
        return exact
    compilers: dict[str, Any] = {
        "persistent rows off": without_persistent_rows,
        "multi_kernel": inductor(**{"triton.multi_kernel": 1}),
        "coordinate descent": inductor(coordinate_descent_tuning=True),
        "epilogue_fusion off": inductor(epilogue_fusion=False),
        "pdl": inductor(**{"triton.enable_pdl": True}),
        "max_autotune_gemm": inductor(**AUTOTUNE),
        "a version for each size": for_each_size(),
        "a version for each size, max_autotune_gemm": for_each_size(**AUTOTUNE),
    }
    found = {name: Candidate({"piece_compiler": compiler}) for name, compiler in compilers.items()}
    for library in ("cublas", "cublaslt"):
        found[f"blas {library}"] = Candidate(around=lambda library=library: blas_library(library))
    return {**exact, **found}


def make_tower(*, small: bool, device: str) -> Any:
    return narrow_tower(2).to(device, torch.bfloat16) if small else demo_tower(27, device, torch.bfloat16)


def grid_of(patches: int) -> Tensor:
    side = int(patches**0.5)
    return torch.tensor([[1, side, side]])


def replays(
    name: str, candidate: Candidate, tower: Any, patches: Sequence[int], exact: Any
) -> dict[str, Any]:
    """One row: milliseconds at every size, what passes changed, and the error at the smallest size."""
    budgets = tuple(count // 4 for count in patches)
    limits = {"token_budgets": budgets, "max_items_per_batch": 1, "max_frames_per_batch": 1, "mode": "full"}
    row: dict[str, Any] = {"candidate": name}
    with candidate.around():
        manager = fx.EncoderCudaGraphManager(
            fx.wrap(copy.deepcopy(tower)), fx.EncoderConfig(**limits, **candidate.settings)
        )
        manager.capture()
        bound = manager.programs["default"]
        if bound is None:
            raise RuntimeError("; ".join(manager.reports))
        row["changed"] = dict(bound.program.pass_report)
        row["derived MiB"] = bound.program.derived.num_bytes / 2**20
        for count in patches:
            captured = manager.paths["default"].ladder.best(count // 4, 1)
            row[str(count)] = device_ms(captured.replay, manager.device)
        grid = grid_of(patches[0])
        torch.manual_seed(0)
        pixels = torch.randn(patches[0], 1536, device=manager.device)
        output = manager.execute({"pixel_values": pixels, "image_grid_thw": grid})[0]
        reference = exact(pixels, grid.to(manager.device))
        packed = torch.cat([reference.pooler_output, *reference.deepstack_features], dim=1)
        row["error"] = relative_rms(output, packed)
        manager.clear()
    return row


def products(
    rows: Sequence[int], layers: dict[str, tuple[int, int]], device: str
) -> Iterator[dict[str, Any]]:
    """A row for every layer, number of rows and way."""
    for layer, (in_features, out_features) in layers.items():
        for count in rows:
            made = torch.randn(out_features, in_features, device=device).bfloat16() * in_features**-0.5
            given = torch.randn(count, in_features, device=device).bfloat16()
            bias = torch.randn(out_features, device=device).bfloat16()
            padded = PADDED.get(out_features if layer == "fc1" else in_features)
            if layer not in ("fc1", "fc2"):
                padded = None
            for way, call in ways(given, made, bias, gelu=layer == "fc1", padded=padded).items():
                size = {"layer": layer, "rows": count, "way": way}
                yield {**size, **attempt(lambda call=call, made=made, given=given: rates(call, given, made))}


def rates(call: Callable[[], Tensor], rows: Tensor, weight: Tensor) -> dict[str, Any]:
    """Microseconds, and what the layer's own arithmetic and bytes in bf16 come to in them."""
    seconds = (captured_ms(call) if rows.is_cuda else wall(call)) / 1e3
    count, (out_features, in_features) = rows.shape[0], weight.shape
    values = count * in_features + weight.numel() + count * out_features
    flops = 2 * count * out_features * in_features
    return {"us": 1e6 * seconds, "TFLOP/s": flops / seconds / 1e12, "GB/s": 2 * values / seconds / 1e9}


def wall(call: Callable[[], Any]) -> float:
    return measure_ms(call, torch.device("cpu"))


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was measured, or why it was not."""
    try:
        return measure()
    except Exception as error:
        return {"failed": one_line(error)}


@torch.no_grad()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="the candidates whose names contain one of these"
    )
    parser.add_argument("--no-replays", action="store_true", help="leave out the candidates")
    parser.add_argument("--no-products", action="store_true", help="leave out the single products")
    parser.add_argument("--small", action="store_true", help="a tiny tower, on a CPU too")
    arguments = parser.parse_args()
    small = arguments.small
    if not small and not torch.cuda.is_available():
        parser.exit(2, "passes.py needs a CUDA device, or --small\n")
    torch._dynamo.config.recompile_limit = 64
    device = "cuda" if torch.cuda.is_available() else "cpu"
    patches = SMALL_PATCHES if small else PATCHES
    tower = make_tower(small=small, device=device)
    exact = copy.deepcopy(tower).float()
    results: dict[str, Any] = {**describe(), "replays": [], "products": []}

    chosen = {} if arguments.no_replays else candidates(small=small)
    for name, candidate in chosen.items():
        if any(part in name for part in arguments.only):
            row = attempt(lambda n=name, c=candidate: replays(n, c, tower, patches, exact))
            results["replays"].append({"candidate": name, **row})
            torch._dynamo.reset()
            store(arguments.output, results)
    print(tables.replays(results["replays"], "simple"), "\n")
    if not arguments.no_products:
        rows, layers = (SMALL_ROWS, SMALL_LAYERS) if small else (ROWS, LAYERS)
        for row in products(rows, layers, device):
            results["products"].append(row)
            store(arguments.output, results)
        print(tables.products(results["products"], "simple"))


if __name__ == "__main__":
    main()
