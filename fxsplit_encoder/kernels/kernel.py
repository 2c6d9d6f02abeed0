"""A kernel of an operation, and a class of calls that share one."""

from __future__ import annotations

import functools
import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch


@dataclass(frozen=True, slots=True)
class CallShape(ABC):
    """One call of an operation; rounded, the class of calls that share a kernel. JSON keeps its fields."""

    operation: ClassVar[str]
    """Also the name of the file of its measurements."""

    device: torch.device
    dtype: torch.dtype

    def rounded(self) -> Self:
        """Returns the class of calls, its own; by default every shape is a class."""
        return self

    @abstractmethod
    def kind(self) -> tuple[int | str, ...]:
        """Fields that, with the dtype, must be equal where one class stands in for another."""

    @abstractmethod
    def extents(self) -> tuple[int, ...]:
        """Numbers in which classes of one kind differ."""

    @property
    def is_captured(self) -> bool:
        """Whether the call is part of a CUDA graph; else its time includes the host's."""
        return True

    def measured_with(self) -> Collection[Self]:
        """Returns the classes that are measured together with this one."""
        return (self,)

    def to_json(self) -> dict[str, Any]:
        """Its fields, without the device."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "device"}
        return {**values, "dtype": str(self.dtype).removeprefix("torch.")}

    @classmethod
    def from_json(cls, values: dict[str, Any], device: torch.device) -> Self:
        """Returns the class with these fields; TypeError, KeyError or AttributeError for others."""
        others = {name: value for name, value in values.items() if name != "dtype"}
        return cls(device, getattr(torch, values["dtype"]), **others)


ShapeT = TypeVar("ShapeT", bound=CallShape)
KernelT = TypeVar("KernelT", bound="Kernel[Any]")


class Kernel(ABC, Generic[ShapeT]):
    """One way to compute an operation. One object serves all threads and devices."""

    name: str
    capturable: bool = True
    """Whether a CUDA graph may hold it."""
    plans_each_shape: bool = False
    """Whether a shape's first call takes tens of milliseconds on the host."""
    is_last_resort: ClassVar[bool] = False
    """Whether it is used only where no other kernel works; it is never measured then."""

    @property
    def is_awaited(self) -> bool:
        """Whether its next call waits for what other processes compile."""
        return False

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Why it cannot run on this device, by its architecture or for a missing package; None: it can."""
        return None

    def supports(self, shape: ShapeT) -> bool:
        """Whether it computes this shape, where it is available."""
        return True


class CudaKernel(Kernel[ShapeT]):
    """A kernel of a package for some GPUs."""

    architectures: tuple[int, ...] = (8, 9, 10, 11, 12)
    """Major numbers of the compute capabilities that it is built for."""
    module: ClassVar[str]
    attribute: ClassVar[str]

    def unavailable_reason(self, device: torch.device) -> str | None:
        """By the device first: importing a package may take seconds."""
        if device.type != "cuda":
            return "needs CUDA"
        major, minor = capability(device)
        if major not in self.architectures:
            needed = ", ".join(f"{m}.x" for m in self.architectures)
            return f"needs compute capability {needed}; this device has {major}.{minor}"
        return self.package_problem(device)

    def package_problem(self, device: torch.device) -> str | None:
        """Why its package cannot be used; None: it can."""
        return find(self.module, self.attribute)[1]

    @property
    def function(self) -> Any:
        """The package's function."""
        return find(self.module, self.attribute)[0]


def works(kernel: Kernel[ShapeT], shape: ShapeT) -> bool:
    """Whether a kernel computes this shape and can run on its device."""
    if shape.is_captured and not kernel.capturable and shape.device.type == "cuda":
        return False
    return kernel.supports(shape) and kernel.unavailable_reason(shape.device) is None


def distance(shape: CallShape, other: CallShape) -> float:
    """Between classes of one kind: the sum of the logarithms, to base 2, of the ratios of their numbers."""
    pairs = zip(shape.extents(), other.extents(), strict=True)
    return sum(abs(math.log2(max(1, one) / max(1, another))) for one, another in pairs)


def round_up(number: int, *, halfway: bool) -> int:
    """Returns the next power of two, or the number halfway to it."""
    power = 1 << (number - 1).bit_length() if number > 0 else 0
    return power * 3 // 4 if halfway and power >= 4 and number <= power * 3 // 4 else power


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


@functools.cache
def processors(device: torch.device) -> int:
    """Returns the multiprocessors of a CUDA device; 0 where there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


_IMPORT_ERRORS = (
    *(ImportError, AssertionError, AttributeError, LookupError, NameError, OSError, RuntimeError),
    *(SyntaxError, TypeError, ValueError),
)


@functools.cache
def find(module: str, attribute: str) -> tuple[Any, str | None]:
    """Returns an attribute of an optional package, or why it is not there."""
    try:
        return getattr(importlib.import_module(module), attribute), None
    except _IMPORT_ERRORS as error:  # a package that is there but broken is as good as missing
        return None, f"cannot import {module}.{attribute}: {type(error).__name__}: {error}"
