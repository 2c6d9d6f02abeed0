"""cuBLASLt's calls, by a stand-in that does on a CPU what `cublasLt.h` says they do."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxsplit_encoder.products import ProductShape, cublaslt
from fxsplit_encoder.products.kernels import cublaslt as kernels
from fxsplit_encoder.products.kernels.cublaslt import CublasLt

CPU = torch.device("cpu")
NAMES = {3: "transa", 7: "epilogue", 8: "bias"}
TYPES = {3: ctypes.c_int32, 7: ctypes.c_uint32, 8: ctypes.c_void_p}


def read(address: int, dtype: torch.dtype, length: int) -> Tensor:
    buffer = (ctypes.c_char * (length * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype)


class StandIn:
    """Matrices by columns; a result of two algorithms, the second of which needs a workspace."""

    def __init__(self) -> None:
        self.objects: dict[int, dict[Any, Any]] = {}
        self.destroyed: list[str] = []
        self.ran: list[int] = []
        self._numbers = itertools.count(1)

    def __getattr__(self, name: str) -> Any:
        for what in ("Create", "SetAttribute", "Destroy"):
            if name.endswith(what):
                kind = name.removeprefix("cublasLt").removesuffix(what)
                return lambda *arguments: getattr(self, f"_{what}")(kind, *arguments)
        raise AttributeError(name)

    def _Create(self, kind: str, made: Any, *arguments: Any) -> int:
        made._obj.value = number = next(self._numbers)
        self.objects[number] = {"kind": kind, "made of": [getattr(a, "value", a) for a in arguments]}
        return 0

    def _SetAttribute(self, kind: str, found: Any, attribute: int, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self.objects[found._as_parameter_.value][attribute] = value._obj.value
        return 0

    def _Destroy(self, kind: str, found: Any) -> int:
        self.destroyed.append(kind)
        return 0

    def cublasLtGetStatusString(self, status: int) -> bytes:
        return b"not supported"

    def cublasLtMatmulAlgoGetHeuristic(self, handle: Any, *arguments: Any) -> int:
        *_, preference, count, results, returned = arguments
        limits = self.objects[preference._as_parameter_.value]
        assert limits[1] == 32 << 20 and limits[3] == 3 and {limits[each] for each in (5, 6, 7, 8)} == {16}
        for number, workspace in enumerate((0, 64)):
            results[number].algorithm[0], results[number].workspace_bytes = number, workspace
        results[2].status = 15
        returned._obj.value = min(count, 3)
        return 0

    def cublasLtMatmul(self, handle: Any, description: Any, alpha: Any, *arguments: Any) -> int:
        a, a_layout, b, b_layout, beta, _, _, d, d_layout, algorithm, workspace, size, stream = arguments
        given = self.objects[description._as_parameter_.value]
        assert (given["made of"], alpha._obj.value, beta._obj.value) == ([68, 0], 1.0, 0.0)
        assert (workspace.value is None) == (size.value == 0) and stream.value == 7
        by_columns = [self._matrix(*each) for each in ((a, a_layout), (b, b_layout), (d, d_layout))]
        left = by_columns[0].t() if given[3] == 1 else by_columns[0]
        result = left.float() @ by_columns[1].float()
        if given[7] & 4:
            result += read(given[8], torch.bfloat16, result.shape[0]).float()[:, None]
        by_columns[2].copy_(F.gelu(result, approximate="tanh") if given[7] & 32 else result)
        self.ran.append(algorithm._obj.algorithm[0])
        return 0

    def _matrix(self, address: Any, layout: Any) -> Tensor:
        dtype, rows, columns, stride = self.objects[layout._as_parameter_.value]["made of"]
        assert dtype == 14 and address.value % 16 == 0
        values = read(address.value, torch.bfloat16, (columns - 1) * stride + rows)
        return values.as_strided((rows, columns), (1, stride))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    monkeypatch.setattr(cublaslt, "load", lambda: (stand_in, None))
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    yield stand_in
    kernels._plan.cache_clear()  # while there is something to destroy its objects


def expected(rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    result = F.linear(rows.float(), weight.float(), None if bias is None else bias.float())
    return (F.gelu(result, approximate="tanh") if activation == "gelu_tanh" else result).bfloat16()


def random(*size: int) -> Tensor:
    return torch.randn(size).bfloat16()


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(("bias", "activation"), [(True, "none"), (True, "gelu_tanh"), (False, "none")])
def test_it_is_a_linear_layer(library: StandIn, number: int, bias: bool, activation: str) -> None:
    """Also of rows, weights and a bias that begin anywhere, and of rows that are parts of others."""
    whole = random(5, 24)
    for rows in (random(5, 16), whole[:, 8:], whole[:, 3:19], random(1, 16), random(0, 16)):
        weight = random(9, 16)[1:]
        added = random(9)[1:] if bias else None
        kernel = CublasLt(number)
        found = kernel(rows, weight, added, activation)
        # GELU's last bits depend on where an entry lies, on some processors.
        torch.testing.assert_close(found, expected(rows, weight, added, activation), rtol=2**-7, atol=1e-5)
        assert found.is_contiguous()
    assert library.ran == [number - 1] * 4  # without rows there is nothing to run


def test_a_shape_is_planned_once_for_all_algorithms(library: StandIn) -> None:
    rows, weight = random(5, 16), random(8, 16)
    for number in (1, 2, 1):
        CublasLt(number)(rows, weight, None, "none")
    kinds = [each["kind"] for each in library.objects.values()]
    assert sorted(kinds) == ["MatmulDesc", "MatmulPreference", *["MatrixLayout"] * 3]
    assert library.destroyed == ["MatmulPreference"]
    kernels._plan.cache_clear()
    assert len(library.destroyed) == 5


def test_algorithms_that_are_not_there_say_so(library: StandIn) -> None:
    with pytest.raises(NotImplementedError, match="cuBLASLt knows 2 algorithms for it"):
        CublasLt(3)(random(5, 16), random(8, 16), None, "none")


def test_a_failure_names_the_call_and_the_reason(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "cublasLtMatmul", lambda *arguments: 15, raising=False)
    with pytest.raises(RuntimeError, match="cublasLtMatmul: not supported"):
        CublasLt(1)(random(5, 16), random(8, 16), None, "none")


def test_it_computes_16_bits_on_cuda_with_the_library_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    device, kernel = torch.device("cuda", 0), CublasLt(1)

    def supported(dtype: torch.dtype, bias: bool, activation: str) -> bool:
        return kernel.supports(ProductShape(device, dtype, 5, 16, 8, bias, activation))

    monkeypatch.setattr(kernels, "capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "has_fused_activations", lambda capability: False)
    assert supported(torch.bfloat16, True, "gelu_tanh") and supported(torch.float16, False, "none")
    assert not supported(torch.float32, True, "none") and not supported(torch.bfloat16, False, "gelu_tanh")
    assert not supported(torch.bfloat16, True, "gelu")
    monkeypatch.setattr(kernels, "has_fused_activations", lambda capability: capability == (9, 0))
    assert not supported(torch.bfloat16, True, "gelu_tanh") and supported(torch.bfloat16, True, "none")
    assert kernel.unavailable_reason(CPU) == "needs CUDA"
    monkeypatch.setattr(torch.version, "cuda", None)
    cublaslt.load.cache_clear()
    assert kernel.unavailable_reason(device) == "torch is built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "1.0")
    cublaslt.load.cache_clear()
    assert "torch has not loaded cuBLASLt" in str(kernel.unavailable_reason(device))
    cublaslt.load.cache_clear()
