"""Choose the kernel of each call of attention: candidates, their comparison, pins and invariant mode."""

from __future__ import annotations

import itertools
import logging
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.kernels.attention.attention_kernel import AttentionKernel, AttentionShape
from fxsplit_encoder.kernels.attention.builtin import (
    BatchedDense,
    Masked,
    PerSegment,
    TorchFlash,
    TritonVarlen,
)
from fxsplit_encoder.kernels.attention.cudnn_varlen import CudnnVarlen
from fxsplit_encoder.kernels.attention.flash_attn import (
    DenseFlashAttention4,
    FlashAttention4,
    VllmFlashAttention,
    WholeWaves,
)
from fxsplit_encoder.kernels.choice import Chooser, KernelMeasurements, kept
from fxsplit_encoder.kernels.kernel import works
from fxsplit_encoder.kernels.meter import Example, Meter
from fxsplit_encoder.kernels.store import KernelStore
from fxsplit_encoder.messages import nearest

logger = logging.getLogger(__name__)

# Segments up to which FlashAttention 4 may be faster with smaller tiles than its own: on an H200 it is up to
# 400 and 1764 tokens (docs/kernels.md).
_SHORT, _MEDIUM = 512, 2048

KERNELS: tuple[AttentionKernel, ...] = (
    TorchFlash(),
    CudnnVarlen(),
    FlashAttention4(),
    FlashAttention4((64, 128), up_to=_SHORT),
    FlashAttention4((128, 128), up_to=_MEDIUM, probabilities_in_registers=True),
    WholeWaves((64, 128)),
    WholeWaves((128, 128), probabilities_in_registers=True),
    DenseFlashAttention4(),
    DenseFlashAttention4((128, 128), up_to=_MEDIUM, probabilities_in_registers=True),
    VllmFlashAttention(),
    TritonVarlen(),
    BatchedDense(),
    PerSegment(),
    Masked(),
)
"""In order of preference where nothing was measured."""


# --- the calls on which they are compared


class AttentionMeter(Meter[AttentionShape, AttentionKernel]):
    """Compares attention kernels on the device."""

    def examples(self, shape: AttentionShape) -> Sequence[Example]:
        """One for every list of `example_lengths`."""
        # Of its own, so that measuring does not change the random numbers of the program.
        generator = torch.Generator(shape.device).manual_seed(0)
        return [_example(shape, lengths, generator) for lengths in example_lengths(shape)]

    def calls(self, shape: AttentionShape) -> Sequence[tuple[object, ...]]:
        """By their segments: known equal segments are known segments too."""
        return [(replace(shape, equal=False), *lengths) for lengths in example_lengths(shape)]


def _example(shape: AttentionShape, lengths: Sequence[int], generator: torch.Generator) -> Example:
    """Random values, as a fused projection lays them out; only rows inside segments count."""
    size = (shape.tokens, 3, shape.heads, shape.head_dim)
    qkv = torch.randn(size, dtype=shape.dtype, device=shape.device, generator=generator)
    boundaries = [0, *itertools.accumulate(lengths)]
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device=shape.device)
    query, key, value = qkv.unbind(1)
    arguments = (query, key, value, cu_seqlens, shape.longest, shape.head_dim**-0.5)

    def timed() -> list[tuple[Any, ...]]:
        # Eager calls have a result tensor, as between captured graphs.
        return [arguments if shape.is_captured else (*arguments, query.new_empty(query.shape))]

    return Example(arguments, query.shape, _in_float32, timed, boundaries[-1])


def _in_float32(query: Tensor, key: Tensor, value: Tensor, *segments: Any) -> Tensor:
    return PerSegment()(query.float(), key.float(), value.float(), *segments)


def example_lengths(shape: AttentionShape) -> list[list[int]]:
    """Lists of segments of this shape: one if known, two if captured, full and spread over the rows."""
    if shape.equal:
        return [[shape.longest] * shape.segments]
    if shape.host_lengths:
        rest = min(shape.tokens - shape.longest, shape.longest * (shape.segments - 1))
        return [[shape.longest, *_share(rest, shape.segments - 1)]]
    full = max(1, min(shape.segments, shape.tokens // shape.longest))
    spread = min(shape.tokens - shape.tokens // 8, shape.longest * shape.segments)
    return [[shape.longest] * full + [0] * (shape.segments - full), _share(spread, shape.segments)]


def _share(tokens: int, segments: int) -> list[int]:
    ends = [tokens * i // segments for i in range(segments + 1)] if segments else [0]
    return [end - start for start, end in itertools.pairwise(ends)]


# --- the setting `attention`
#
# Conditions, of which a key has one or more: `windowed` (several segments of at most 256 tokens) or `full`;
# `captured` (inside a CUDA graph) or `known`; comparisons of tokens, longest, segments and head_dim.

AUTO = "auto"

Condition = Callable[[AttentionShape], bool]

_LONGEST_WINDOW = 256


def _is_windowed(shape: AttentionShape) -> bool:
    return shape.segments > 1 and shape.longest <= _LONGEST_WINDOW


_WORDS: Mapping[str, Condition] = {
    "windowed": _is_windowed,
    "full": lambda shape: not _is_windowed(shape),
    "captured": lambda shape: shape.is_captured,
    "known": lambda shape: shape.host_lengths,
}
_NUMBERS = ("tokens", "longest", "segments", "head_dim")
_OPERATORS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "=": operator.eq}
_COMPARISON = re.compile(rf"({'|'.join(_NUMBERS)})\s*(<=|>=|<|>|=)\s*(\d+)")


class Pin(NamedTuple):
    """A kernel's name, or `auto`, for the calls that fulfil every condition."""

    kernel: str
    conditions: tuple[Condition, ...]

    def holds(self, shape: AttentionShape) -> bool:
        """Whether the call fulfils every condition."""
        return all(condition(shape) for condition in self.conditions)


def parse_pins(attention: str | Mapping[str, str], kernels: Sequence[str]) -> list[Pin]:
    """The pins of the setting, the first of which that holds counts; ConfigError names unknown words."""
    pins: list[Pin] = []
    problems: list[str] = []
    for key, kernel in ({"": attention} if isinstance(attention, str) else attention).items():
        where = f"attention.{key}" if key else "attention"
        if kernel not in (AUTO, *kernels):
            problems.append(f"{where}: {_unknown(kernel, (AUTO, *kernels))}")
        conditions = {word: _condition(word) for part in key.split(",") if (word := part.strip())}
        known = (*_WORDS, *(f"{name}<=N" for name in _NUMBERS))
        problems += [f"{where}: {_unknown(word, known)}" for word, found in conditions.items() if not found]
        pins.append(Pin(kernel, tuple(filter(None, conditions.values()))))
    if problems:
        raise ConfigError(*problems)
    return pins


def _condition(word: str) -> Condition | None:
    comparison = _COMPARISON.fullmatch(word)
    if comparison is None:
        return _WORDS.get(word)
    name, sign, number = comparison.groups()
    compare, bound = _OPERATORS[sign], int(number)
    return lambda shape: bool(compare(getattr(shape, name), bound))


def _unknown(name: str, allowed: Sequence[str]) -> str:
    return f"unknown; {nearest(name, allowed)}allowed: {', '.join(allowed)}; got {name!r}"


# --- the choice


class Measurements(KernelMeasurements[AttentionShape, AttentionKernel]):
    """Measurements of every class of calls of attention, on every device."""

    def __init__(
        self,
        kernels: Sequence[AttentionKernel] = KERNELS,
        meter: AttentionMeter | None = None,
        store: Callable[[torch.device], KernelStore] | None = None,
    ) -> None:
        super().__init__(AttentionShape, kernels, AttentionMeter() if meter is None else meter, store)

    def class_of(self, shape: AttentionShape) -> AttentionShape:
        """Every number of tokens is a class of its own where a kernel works that `depends_on_tokens`."""
        own_tokens = any(kernel.depends_on_tokens for kernel in self.candidates(shape))
        return shape.rounded(own_tokens=own_tokens)


MEASUREMENTS = Measurements(store=kept)


class KernelChooser(Chooser[AttentionShape, AttentionKernel]):
    """Chooses the kernel of each call by the setting `attention` or by time; one for all if `invariant`."""

    current: ClassVar[ContextVar[KernelChooser]]

    def __init__(
        self,
        attention: str | Mapping[str, str] = AUTO,
        measurements: Measurements = MEASUREMENTS,
        *,
        invariant: bool = False,
    ) -> None:
        super().__init__(measurements)
        self._kernels = {kernel.name: kernel for kernel in measurements.kernels}
        self._pins = parse_pins(attention, [*self._kernels])
        self.invariant = invariant
        self._by_heads: dict[tuple[object, ...], AttentionKernel] = {}
        self._warned: set[str] = set()

    @property
    def pinned_names(self) -> list[str]:
        """The names of the kernels that are pinned for some calls, in order."""
        return list(dict.fromkeys(pin.kernel for pin in self._pins if pin.kernel != AUTO))

    def pinned(self, shape: AttentionShape) -> AttentionKernel | None:
        """Returns the kernel that is pinned for a shape, if one is and it computes this shape."""
        name = next((pin.kernel for pin in self._pins if pin.holds(shape)), AUTO)
        kernel = self._kernels.get(name)
        if kernel is None or works(kernel, shape):
            return kernel
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "attention: %s is pinned but does not compute %s; another kernel does", name, shape
            )
        return None

    def check(self, device: torch.device) -> None:
        """Checks that pinned kernels work on a device, by one algorithm if `invariant`, or ConfigError."""
        problems = [
            f"attention: {name} cannot run on {device}: {reason}"
            for name in sorted(self.pinned_names)
            if (reason := self._kernels[name].unavailable_reason(device)) is not None
        ]
        if self.invariant and not problems:
            allowed = sorted(invariant_names(self.measurements.kernels, device))
            problems = [
                f"attention: contradicts invariant: {name} may attend by several algorithms on {device}; "
                f"allowed: {', '.join((AUTO, *allowed))}"
                for name in sorted({*self.pinned_names} - {*allowed})
            ]
        if problems:
            raise ConfigError(*problems)

    def of(
        self, query_THD: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, equal: bool = False
    ) -> AttentionKernel:
        """The kernel of a call whose segments the host does not know, or that are a batch (`equal`)."""
        call = (query_THD.shape, query_THD.dtype, query_THD.device, cu_seqlens.shape, max_seqlen, equal)
        return self.remembered(
            call, lambda: shape_of(query_THD, max_seqlen, cu_seqlens.shape[0] - 1, equal=equal)
        )

    def ranking(self, shape: AttentionShape) -> tuple[AttentionKernel, ...]:
        """Returns the kernels that may compute this shape, the chosen one first; at least one."""
        return (self.only(shape),) if self.invariant else super().ranking(shape)

    def only(self, shape: AttentionShape) -> AttentionKernel:
        """Returns the kernel of every call with such heads if `invariant`; ConfigError if there is none."""
        heads = (shape.device, shape.dtype, shape.heads, shape.head_dim)
        if heads not in self._by_heads:
            pinned = next(iter(self.pinned_names), None)
            # Of the calls that there are the least is known of a captured one.
            any_call = replace(shape, host_lengths=False, equal=False)
            self._by_heads[heads] = invariant_kernel(self.measurements.kernels, any_call, pinned)
        return self._by_heads[heads]

    @property
    def chosen(self) -> list[str]:
        """The kernels that `only` has chosen so far, each with its heads."""
        return sorted(
            f"{heads}x{head_dim} {str(dtype).removeprefix('torch.')}: {kernel.name}"
            for (_, dtype, heads, head_dim), kernel in self._by_heads.items()
        )


def shape_of(
    query_THD: Tensor, longest: int, segments: int, *, host_lengths: bool = False, equal: bool = False
) -> AttentionShape:
    """Returns the shape of a call."""
    tokens, heads, head_dim = query_THD.shape
    return AttentionShape(
        *(query_THD.device, query_THD.dtype, heads, head_dim, tokens, longest, segments), host_lengths, equal
    )


# --- invariant mode
#
# One kernel attends everywhere, chosen by what it is and never by time. What a segment gets from it depends
# on that segment alone, which rules out kernels that choose tiles by the longest segment or split the keys.

# The fastest of them at long segments, by the measurements of docs/kernels.md; then as they are listed.
_PREFERRED = "flash_attn_4"


def invariant_kernel(
    kernels: Sequence[AttentionKernel], shape: AttentionShape, pinned: str | None = None
) -> AttentionKernel:
    """The best kernel, or that `pinned`, that attends to a shape's heads by one algorithm, or ConfigError."""
    reasons = []
    for kernel in _in_order(kernels):
        if pinned not in (None, kernel.name):
            continue
        reason = _why_not(kernel, shape)
        if reason is None:
            return kernel
        if kernel.is_invariant or pinned is not None:
            reasons.append(f"{kernel.name}: {reason}")
    heads = f"{shape.heads} heads of {shape.head_dim} in {str(shape.dtype).removeprefix('torch.')}"
    raise ConfigError(
        f"invariant: no kernel attends to {heads} on {shape.device} by one algorithm for all segments "
        f"({'; '.join(reasons)}); allowed: on CUDA a tower in bfloat16 or float16, with attention: auto"
    )


def invariant_names(kernels: Sequence[AttentionKernel], device: torch.device) -> list[str]:
    """Returns the kernels that `invariant` may choose on a device, in order of preference."""
    working = (k for k in _in_order(kernels) if k.is_invariant and k.unavailable_reason(device) is None)
    return [kernel.name for kernel in working if kernel.is_invariant_on(device)]


def _in_order(kernels: Sequence[AttentionKernel]) -> list[AttentionKernel]:
    return sorted(kernels, key=lambda kernel: kernel.name != _PREFERRED)


def _why_not(kernel: AttentionKernel, shape: AttentionShape) -> str | None:
    if not kernel.is_invariant:
        return "its algorithm may depend on the segments"
    if (reason := kernel.unavailable_reason(shape.device)) is not None:
        return reason
    if not kernel.is_invariant_on(shape.device):
        return "on this device its algorithm depends on the longest segment"
    if shape.device.type == "cuda" and not kernel.capturable:
        return "no CUDA graph can hold it"
    return None if kernel.supports(shape) else "it does not compute such heads"


# --- the chooser in use

_of_process = KernelChooser()
KernelChooser.current = ContextVar("fxsplit_encoder_attention", default=_of_process)

# Every call of attention asks for it: no frame of Python.
current_chooser: Callable[[], KernelChooser] = KernelChooser.current.get
"""The chooser of the enclosing `choosing`, or the process's own, which pins nothing."""


# Entered for every request: a class takes a third of the time of a generator.
class choosing:
    """Makes a chooser current."""

    __slots__ = ("_chooser", "_token")

    def __init__(self, chooser: KernelChooser) -> None:
        self._chooser = chooser

    def __enter__(self) -> None:
        self._token: Token[KernelChooser] = self._chooser.current.set(self._chooser)

    def __exit__(self, *raised: object) -> None:
        self._chooser.current.reset(self._token)
