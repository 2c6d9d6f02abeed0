"""Sizes of captures: the token budgets of every path, and the items and frames of a batch."""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import ConfigError, InputError
from fxsplit_encoder.protocol import EncoderCudaGraphConfig, EncoderCudaGraphPathConfig


def generate_budgets(minimum: int, maximum: int) -> list[int]:
    """Returns powers of two times `minimum`, and `maximum`; InputError: not 1 <= minimum <= maximum."""
    if not 1 <= minimum <= maximum:
        raise InputError(f"budgets need 1 <= minimum <= maximum; got minimum {minimum}, maximum {maximum}")
    doublings = (maximum // minimum).bit_length()
    budgets = [minimum << power for power in range(doublings)]
    return budgets if budgets[-1] == maximum else [*budgets, maximum]


def default_budgets(minimum: int, maximum: int, tile: int = 1) -> list[int]:
    """Returns powers of two times `minimum`, the quarters between them that are multiples of `tile`, and
    `maximum`; InputError: not 1 <= minimum <= maximum. Uniform sizes are padded by 1/13, by powers by 25 %.
    """
    powers = generate_budgets(minimum, maximum)
    quarters = (power * part // 4 for power in powers for part in (5, 6, 7))
    whole = (budget for budget in quarters if budget % tile == 0 and budget < maximum)
    return sorted({*powers, *whole})


def inferred_budgets(minimum: int, maximum: int, tile: int, max_items: int) -> tuple[int, ...]:
    """Returns the default ladder over a range, at least a `tile` an item; InputError: the range is empty."""
    for_items = -(-max_items // tile) * tile
    return tuple(default_budgets(max(minimum, for_items), maximum - maximum % tile, tile))


def smallest_fitting(budgets: Sequence[int], tokens: int) -> int | None:
    """Returns the smallest of the increasing `budgets` that holds `tokens`; None: all are too small."""
    position = bisect.bisect_left(budgets, tokens)
    return budgets[position] if position < len(budgets) else None


# For a tower whose range holds one smallest item only. That tells how large its items are, not that they
# should be encoded one by one.
_ITEMS_OF_A_NARROW_RANGE = 8


class CaptureKey(NamedTuple):
    """Identifies a capture of a tower."""

    path: str
    budget: int
    """Output tokens of the capture; 0: all captures at exact shapes, together."""
    axis_keys: tuple[Hashable, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Limits of a tower's batches in captures."""

    path_budgets: Mapping[str, tuple[int, ...]]
    """Budgets of every path in output tokens, increasing; a path without any is never captured."""
    max_items_per_batch: int
    """Images and videos in a batch, at least 1 and at most the smallest budget."""
    max_frames_per_batch: int
    """Video frames in a batch; 0: images only."""
    skippable_paths: frozenset[str] = frozenset()
    """Paths that a batch without tokens there skips; any other path is encoded for every batch."""
    tiles: Mapping[str, int] = field(default_factory=dict)
    """Output tokens of one tile of a path, where the tower declares it."""

    def is_always_full(self, path: str, budget: int) -> bool:
        """Whether only whole tiles that fill a budget take it, so that it is never padded."""
        tile = self.tiles.get(path)
        before = max((each for each in self.path_budgets[path] if each < budget), default=0)
        return tile is not None and before % tile == 0 and budget == before + tile


def needs_budget_range(config: EncoderConfig, model_config: EncoderCudaGraphConfig) -> bool:
    """Returns whether the tower's range decides the budgets of a path, or the items of a batch."""
    listed = all(_listed_budgets(name, config) for name in model_config.paths)
    return not (listed and config.max_items_per_batch)


def resolve_limits(
    config: EncoderConfig,
    model_config: EncoderCudaGraphConfig,
    budget_range: tuple[int, int] | None,
    has_video: bool,
) -> Limits:
    """Returns the limits of a tower: those of the configuration, else defaults from its range.

    A path has the budgets listed for it, else for all paths, else `default_budgets` from its own minimum (or
    the range's) to the range's maximum. A listed 0 only states that a batch without tokens skips the path.
    Items default to as many of the smallest as the range's maximum holds, frames to those of as many of the
    longest videos.

    Args:
        budget_range: of the tower, in output tokens; None: unknown, see `needs_budget_range`.
        has_video: whether videos are encoded; if not, `max_frames_per_batch` is 0.

    Raises:
        ConfigError: the settings do not suit this tower.
        InputError: the tower declares no path, or an impossible range.
    """
    _check(config, model_config, budget_range)
    path_budgets = {
        name: _path_budgets(name, path, config, budget_range) for name, path in model_config.paths.items()
    }
    smallest = [budgets[0] for budgets in path_budgets.values() if budgets]
    items = config.max_items_per_batch
    if not items:
        assert budget_range is not None
        inferred = budget_range[1] // budget_range[0]
        items = min([inferred if inferred > 1 else _ITEMS_OF_A_NARROW_RANGE, *smallest])
    frames = config.max_frames_per_batch
    if frames is None:
        frames = items * model_config.max_frames_per_video
    skippable = frozenset(name for name, path in model_config.paths.items() if path.allow_zero_tokens)
    declared = {name: path.min_token_budget for name, path in model_config.paths.items()}
    tiles = {name: tile for name, tile in declared.items() if tile is not None}
    return Limits(path_budgets, items, frames if has_video else 0, skippable, tiles)


def _check(
    config: EncoderConfig, model_config: EncoderCudaGraphConfig, budget_range: tuple[int, int] | None
) -> None:
    if budget_range is not None and not 1 <= budget_range[0] <= budget_range[1]:
        minimum, maximum = budget_range
        raise InputError(
            f"the tower's budget range must satisfy 1 <= minimum <= maximum; got {minimum}, {maximum}"
        )
    if not model_config.paths:
        raise InputError("the tower declares no encoder path; expected at least one, such as 'default'")
    for name in config.paths:
        if name not in model_config.paths:
            raise ConfigError(
                f"paths.{name}: the tower has no such path; allowed: {', '.join(model_config.paths)}"
            )


def _path_budgets(
    name: str, path: EncoderCudaGraphPathConfig, config: EncoderConfig, budget_range: tuple[int, int] | None
) -> tuple[int, ...]:
    listed = _listed_budgets(name, config)
    if 0 in listed and not path.allow_zero_tokens:
        raise ConfigError(
            f"paths.{name}.token_budgets: 0 is listed, but the tower encodes this path for every batch and "
            f"never skips it; allowed: integers of at least 1; got {list(listed)}"
        )
    if listed:
        return tuple(budget for budget in listed if budget)
    assert budget_range is not None
    minimum, maximum = budget_range
    tile = 1
    if path.min_token_budget is not None:
        minimum = tile = path.min_token_budget
    if not 1 <= minimum <= maximum:
        raise InputError(
            f"path {name!r} declares a smallest budget of {minimum} tokens; expected 1 to {maximum}, where "
            f"the tower's range ends; list budgets under paths.{name}.token_budgets instead"
        )
    maximum -= maximum % tile
    if config.max_items_per_batch > maximum:
        raise ConfigError(
            f"max_items_per_batch: above the largest budget that the tower's range gives path {name!r}; "
            f"allowed: 0 to {maximum}; got {config.max_items_per_batch}"
        )
    return inferred_budgets(minimum, maximum, tile, config.max_items_per_batch)


def _listed_budgets(name: str, config: EncoderConfig) -> tuple[int, ...]:
    own = config.paths[name].token_budgets if name in config.paths else ()
    return own or config.token_budgets
