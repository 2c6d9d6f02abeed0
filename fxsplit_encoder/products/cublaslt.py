"""cuBLASLt by its C interface: a linear layer by any of the algorithms that its heuristic knows.

Torch takes the first one. It is the library that torch has loaded, so no package is needed; names and numbers
are those of `cublasLt.h`, where they only ever grow.

cuBLASLt reads matrices by columns, so it sees the transpose of each: of the weight (in_features,
out_features), of the rows (in_features, rows). It multiplies the first, transposed, by the second, and adds
the bias to every column of the result (out_features, rows).
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WORKSPACE_BYTES = 32 << 20
"""The most that an algorithm may take for itself: what torch gives cuBLASLt on Hopper."""

ALIGNMENT = 16
"""Of every pointer, in bytes."""

# cublasLtMatmulDescAttributes_t, cublasLtMatmulPreferenceAttributes_t, cublasLtEpilogue_t and what they take.
_TRANSA, _EPILOGUE, _BIAS_POINTER = 3, 7, 8
_MAX_WORKSPACE, _REDUCTION_SCHEMES, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_TRANSPOSED = 1
_NOTHING, _BIAS, _GELU = 1, 4, 32
# Parts of a sum that is split may be added in place or apart, but always in float32.
_REDUCED_IN_FLOAT32 = 1 | 2

# cudaDataType_t and cublasComputeType_t.
_DTYPES = {torch.bfloat16: 14, torch.float16: 2}
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68


class _Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@functools.cache
def load() -> tuple[Any, str | None]:
    """The library, or why it cannot be used."""
    if torch.version.cuda is None:
        return None, "torch is built without CUDA"
    try:
        version = torch.version.cuda.split(".")[0]
        # Not loaded anew: it has to be the one of torch's handle.
        library = ctypes.CDLL(f"libcublasLt.so.{version}", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except (OSError, AttributeError) as error:
        return None, f"torch has not loaded cuBLASLt: {error}"
    library.cublasLtGetStatusString.restype = ctypes.c_char_p
    return library, None


def _call(name: str, *arguments: Any) -> None:
    """Calls a function of the library.

    Raises:
        RuntimeError: it returned something else than success.
    """
    library = load()[0]
    status = getattr(library, name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name}: {library.cublasLtGetStatusString(status).decode()}")


class _Object:
    """Something that the library makes, and destroys with this.

    Args:
        kind: as in `cublasLtMatmulDescCreate`.
    """

    def __init__(self, kind: str, *arguments: Any) -> None:
        self._as_parameter_ = ctypes.c_void_p()
        self._kind = kind
        _call(f"cublasLt{kind}Create", ctypes.byref(self._as_parameter_), *arguments)
        weakref.finalize(self, _call, f"cublasLt{kind}Destroy", self._as_parameter_).atexit = False

    def set(self, attribute: int, value: Any) -> None:
        """Sets an attribute to a value of ctypes."""
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _call(f"cublasLt{self._kind}SetAttribute", self, attribute, ctypes.byref(value), size)


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer at a number of rows."""

    device: torch.device
    dtype: torch.dtype
    rows: int
    in_features: int
    out_features: int
    row_stride: int
    bias: bool
    gelu: bool


class Plan:
    """A product and the algorithms for it, in the order of the library's heuristic.

    Args:
        product: what is computed.
        count: of how many algorithms.

    Raises:
        RuntimeError: the library knows none.
    """

    def __init__(self, product: Product, count: int) -> None:
        dtype, inner, outer = _DTYPES[product.dtype], product.in_features, product.out_features
        self._description = describe(product)
        self._weight, self._rows, self._result = (
            _Object("MatrixLayout", dtype, *map(ctypes.c_uint64, sizes), ctypes.c_int64(stride))
            for sizes, stride in (
                ((inner, outer), inner),
                ((inner, product.rows), product.row_stride),
                ((outer, product.rows), outer),
            )
        )
        self._lock = threading.Lock()
        found, returned = (_Result * count)(), ctypes.c_int()
        _call(
            "cublasLtMatmulAlgoGetHeuristic",
            *(_handle(), self._description, self._weight, self._rows, self._result, self._result),
            *(preference(), count, found, ctypes.byref(returned)),
        )
        self.algorithms = [each for each in found[: returned.value] if each.status == 0]

    def run(
        self, number: int, rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, workspace: Tensor
    ) -> None:
        """Computes the product on the current stream by one of the algorithms, counted from 0. Everything is
        aligned to `ALIGNMENT` bytes, and the workspace as large as the algorithm says.
        """
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        algorithm = self.algorithms[number]
        stream = torch.cuda.current_stream(rows.device).cuda_stream
        result = ctypes.c_void_p(out.data_ptr())
        with self._lock:
            if bias is not None:
                self._description.set(_BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
            _call(
                "cublasLtMatmul",
                *(_handle(), self._description, ctypes.byref(one)),
                *(ctypes.c_void_p(weight.data_ptr()), self._weight),
                *(ctypes.c_void_p(rows.data_ptr()), self._rows),
                *(ctypes.byref(zero), result, self._result, result, self._result),
                *(ctypes.byref(algorithm), ctypes.c_void_p(workspace.data_ptr())),
                *(ctypes.c_size_t(algorithm.workspace_bytes), ctypes.c_void_p(stream)),
            )


def describe(product: Product) -> _Object:
    """The operation, its epilogue included."""
    description = _Object("MatmulDesc", _COMPUTE_FLOAT32, _FLOAT32)
    description.set(_TRANSA, ctypes.c_int32(_TRANSPOSED))
    epilogue = (_BIAS if product.bias else 0) | (_GELU if product.gelu else 0)
    description.set(_EPILOGUE, ctypes.c_uint32(epilogue or _NOTHING))
    if product.bias:  # the heuristic asks how it is aligned, and does not read it
        description.set(_BIAS_POINTER, ctypes.c_void_p(ALIGNMENT))
    return description


def preference() -> _Object:
    """Which algorithms come into question."""
    wanted = _Object("MatmulPreference")
    wanted.set(_MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES))
    wanted.set(_REDUCTION_SCHEMES, ctypes.c_uint32(_REDUCED_IN_FLOAT32))
    for attribute in _ALIGNMENTS:
        wanted.set(attribute, ctypes.c_uint32(ALIGNMENT))
    return wanted


def _handle() -> ctypes.c_void_p:
    """A handle of cuBLAS is one of cuBLASLt. Torch has one for each thread and device."""
    handle: int = torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
    return ctypes.c_void_p(handle)
