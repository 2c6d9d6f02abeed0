"""Token sequences with places for images and videos, padded on the left into a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

PAD, BOS, IMAGE, VIDEO, START, END = 0, 1, 60, 61, 62, 63

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "bos_token_id": BOS,
    "eos_token_id": None,
    "pad_token_id": PAD,
    "max_position_embeddings": 512,
}
"""A language model with these tokens."""

Runs = Sequence[tuple[int, int]]
"""(token, how often) of what stands for one image or video."""


def sequence(items: Sequence[Runs], seed: int = 0) -> list[int]:
    """Text, then every item between its marks, then text."""
    tokens = [BOS, 5 + seed, 9]
    for runs in items:
        for token, count in runs:
            tokens += [START, *[token] * count, END]
    return [*tokens, 7, 8 + seed]


def batch(sequences: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`."""
    longest = max(map(len, sequences))
    ids = [[PAD] * (longest - len(tokens)) + list(tokens) for tokens in sequences]
    mask = [[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in sequences]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
