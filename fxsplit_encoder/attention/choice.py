"""Which kernel attends: `kernels.choice` for calls of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from fxsplit_encoder.attention.invariant import invariant_kernel, invariant_names
from fxsplit_encoder.attention.kernels import KERNELS, AttentionKernel, AttentionShape
from fxsplit_encoder.attention.measure import AttentionMeter, example_lengths, pairs
from fxsplit_encoder.attention.pins import parse_attention
from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.kernels import AUTO, Chooser, KernelMeasurements, MeasurementCache

# What an eager call costs at least, however little it attends to: the host's part of it. That of the dense
# kernels was 38 to 141 microseconds on the host of an H200, with a median of 55
# (benchmarks/results/attention.json).
_HOST_US = 50.0


class Measurements(KernelMeasurements[AttentionShape, AttentionKernel]):
    """What is known of every class of calls of attention, on every device."""

    def __init__(
        self,
        kernels: Sequence[AttentionKernel] = KERNELS,
        meter: AttentionMeter | None = None,
        cache: Callable[[torch.device], MeasurementCache[AttentionShape]] | None = None,
    ) -> None:
        super().__init__(AttentionShape, kernels, AttentionMeter() if meter is None else meter, cache)

    def class_of(self, shape: AttentionShape) -> AttentionShape:
        """Every number of tokens is a class of its own where a kernel works that `depends_on_tokens`."""
        own_tokens = any(kernel.depends_on_tokens for kernel in self.candidates(shape))
        return shape.rounded(own_tokens=own_tokens)


MEASUREMENTS = Measurements().keep()
"""Those of this process."""


class KernelChooser(Chooser[AttentionShape, AttentionKernel]):
    """Chooses the kernel of every call of attention: the pinned one, else the fastest that was measured.

    Args:
        attention: the setting of that name, see `attention.pins`.
        measurements: where times come from.
        invariant: whether one kernel attends everywhere, see `attention.invariant`; of the settings a
            kernel's name and `auto` allow that.

    Raises:
        ConfigError: the setting names an unknown kernel or condition.
    """

    current: ClassVar[ContextVar[KernelChooser]]

    def __init__(
        self,
        attention: str | Mapping[str, str] = AUTO,
        measurements: Measurements = MEASUREMENTS,
        *,
        invariant: bool = False,
    ) -> None:
        super().__init__(parse_attention(attention), measurements)
        self.invariant = invariant
        self._by_heads: dict[tuple[object, ...], AttentionKernel] = {}

    def check(self, device: torch.device) -> None:
        """Checks that every pinned kernel works on a device, and by one algorithm where `invariant` is set.

        Raises:
            ConfigError: one does not, and why.
        """
        super().check(device)
        pinned = {pin.kernel for pin in self.pins} - {AUTO}
        allowed = {*invariant_names(self.measurements.kernels, device)} if self.invariant else pinned
        if not pinned <= allowed:
            raise ConfigError(
                *(
                    f"attention: contradicts invariant: {name} may attend by several algorithms on {device}; "
                    f"allowed: {', '.join((AUTO, *sorted(allowed)))}"
                    for name in sorted(pinned - allowed)
                )
            )

    def of(
        self, query_THD: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, equal: bool = False
    ) -> AttentionKernel:
        """The kernel of a call whose segments the host does not know, or that are a batch (`equal`)."""
        call = (query_THD.shape, query_THD.dtype, query_THD.device, cu_seqlens.shape, max_seqlen, equal)
        return self.remembered(
            call, lambda: shape_of(query_THD, max_seqlen, cu_seqlens.shape[0] - 1, equal=equal)
        )

    def ranking(self, shape: AttentionShape) -> tuple[AttentionKernel, ...]:
        """The kernels that may compute this shape, the chosen one first; at least one."""
        return (self.only(shape),) if self.invariant else super().ranking(shape)

    def only(self, shape: AttentionShape) -> AttentionKernel:
        """The kernel of every call with heads like these, where `invariant` is set.

        Raises:
            ConfigError: there is none.
        """
        heads = (shape.device, shape.dtype, shape.heads, shape.head_dim)
        if heads not in self._by_heads:
            pinned = next((pin.kernel for pin in self.pins if pin.kernel != AUTO), None)
            # Of the calls that there are the least is known of a captured one.
            any_call = replace(shape, host_lengths=False, equal=False)
            self._by_heads[heads] = invariant_kernel(self.measurements.kernels, any_call, pinned)
        return self._by_heads[heads]

    @property
    def chosen(self) -> list[str]:
        """The kernels that `only` has chosen so far, each with what it attends to."""
        return sorted(
            f"{heads}x{head_dim} {str(dtype).removeprefix('torch.')}: {kernel.name}"
            for (_, dtype, heads, head_dim), kernel in self._by_heads.items()
        )

    def estimate(self, shape: AttentionShape, lengths: Sequence[int]) -> float | None:
        """Microseconds that the chosen kernel will take for known segments; None: nothing was measured.

        The time of the nearest class, scaled by the pairs of tokens that attend to each other.
        """
        found = self.measurements.find(shape)
        if found is None:
            return None
        measured_shape, measured = found
        chosen = measured.microseconds.get(self.ranking(shape)[0].name)
        if chosen is None:
            return None
        work = pairs(list(lengths)) / max(1, pairs(example_lengths(measured_shape)[0]))
        return max(chosen * work, min(chosen, _HOST_US))


def shape_of(
    query_THD: Tensor, longest: int, segments: int, *, host_lengths: bool = False, equal: bool = False
) -> AttentionShape:
    """The shape of a call."""
    tokens, heads, head_dim = query_THD.shape
    return AttentionShape(
        *(query_THD.device, query_THD.dtype, heads, head_dim, tokens, longest, segments), host_lengths, equal
    )


_of_process = KernelChooser()
KernelChooser.current = ContextVar("fxsplit_encoder_attention", default=_of_process)

# Every call of attention asks for it: no frame of Python.
current_chooser: Callable[[], KernelChooser] = KernelChooser.current.get
"""The chooser of the enclosing `choosing`, or the process's own, which pins nothing."""
