"""Why something was not served by a replay."""

from __future__ import annotations

from enum import StrEnum


class MissReason(StrEnum):
    """Every fallback is counted under one of these."""

    OVER_LARGEST_BUDGET = "over_largest_budget"
    """More output tokens than the largest budget."""

    TOO_MANY_FRAMES = "too_many_frames"
    """The video has more frames than a batch may have."""

    TOO_MANY_SEGMENTS = "too_many_segments"
    """More images and frames than any budget that holds the tokens has segments."""

    NOT_CAPTURED = "not_captured"
    """The budgets that would fit are not captured, or were dropped at capture."""

    DISABLED = "disabled"
    """Captures are switched off, by `enabled: false` or `mode: none`."""

    EXACT_IS_FASTER = "exact_is_faster"
    """By the measurements, the compiled forward at the exact shape costs no more than the replay."""

    EAGER_IS_FASTER = "eager_is_faster"
    """By the measurements, the eager forward costs less than the replay and than the exact shape."""

    UNSUPPORTED_INPUT = "unsupported_input"
    """The tower captures nothing for this modality or kind of input."""

    EXTENT_EXCEEDED = "extent_exceeded"
    """A value that the replay needs is larger than the captured buffer, which may have fewer rows than its
    budget asks for, or the captures have no buffer for it."""

    PADDING_UNPROVED = "padding_unproved"
    """The graph's rows may depend on one another, so it is never padded."""

    UNSUPPORTED_GRAPH = "unsupported_graph"
    """Nothing of the graph is captured: it draws random numbers, or attends over rows that are not its
    tokens."""

    STATIC_SHAPE = "static_shape"
    """The graph was traced for one shape; there is nothing to pad."""

    NEW_SHAPE = "new_shape"
    """With `mode: exact`: batches of this token count have not come often enough to be captured."""

    OPTIONS = "options"
    """The call's arguments change what the tower returns, such as `output_hidden_states=True`."""

    GRADIENTS = "gradients"
    """Gradients are to be computed through the tower."""

    TRAINING = "training"
    """A module of the tower is in training mode, and computes something else there."""

    AUTOCAST = "autocast"
    """The call runs under autocast, whose dtypes captures do not have."""

    FOREIGN_CODE = "foreign_code"
    """The tower runs code that captures would leave out: hooks, adapter layers, another forward, a custom
    attention function, a transform of torch.func, or a mode that sees each operation."""

    OFFLOADED = "offloaded"
    """The tower's parameters are not all on one device."""

    OUTER_TRACE = "outer_trace"
    """The call is part of another trace, by `torch.compile` for example, which takes the tower as it is."""

    UNCAPTURED_OUTPUT = "uncaptured_output"
    """An output was read that captures do not make, such as hidden states: the tower itself computed it."""


BY_THE_TOWER = frozenset({MissReason.TRAINING, MissReason.FOREIGN_CODE})
"""Why nothing but the tower's own forward may serve."""
