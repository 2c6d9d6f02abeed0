"""A start on disk: what was compiled, measured and chosen, for processes on devices of the same kind."""

from fxsplit_encoder.start.environment import Key, differences, plain
from fxsplit_encoder.start.saved import KnownTower, ReadStart, read, save

__all__ = ["Key", "KnownTower", "ReadStart", "differences", "plain", "read", "save"]
