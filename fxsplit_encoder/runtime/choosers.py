"""Which kernels one configuration's calls get, of every operation that has several."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import torch

from fxsplit_encoder.attention import KernelChooser
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.kernels import Chooser, KernelMeasurements, choosing, failing
from fxsplit_encoder.products import ProductChooser


@dataclass
class Choosers:
    """One of each operation."""

    attention: KernelChooser = field(default_factory=KernelChooser)
    products: ProductChooser = field(default_factory=ProductChooser)

    @classmethod
    def of(cls, config: EncoderConfig) -> Self:
        """Those that settings ask for.

        Raises:
            ConfigError: a setting names an unknown kernel or condition.
        """
        attention = KernelChooser(config.attention, invariant=config.invariant)
        return cls(attention, ProductChooser(config.products))

    def check(self, device: torch.device) -> None:
        """Checks that every pinned kernel works on a device.

        Raises:
            ConfigError: one does not, and why.
        """
        for chooser in self.all:
            chooser.check(device)

    def failures(self, device: torch.device) -> list[str]:
        """The kernels that raise on a device, a line for each operation and reason."""
        names: dict[tuple[str, str], list[str]] = {}
        for chooser in self.all:
            measurements = chooser.measurements
            for name, reason in failing(measurements.table(device)).items():
                names.setdefault((measurements.shape.operation, reason), []).append(name)
        return [f"{operation}: {', '.join(each)}: {reason}" for (operation, reason), each in names.items()]

    def choosing(self) -> choosing:
        """Inside, these decide."""
        return choosing(*self.all)

    @property
    def measurements(self) -> list[KernelMeasurements[Any, Any]]:
        """Where their times come from."""
        return [chooser.measurements for chooser in self.all]

    @cached_property
    def all(self) -> tuple[Chooser[Any, Any], ...]:
        """All of them."""
        return self.attention, self.products
