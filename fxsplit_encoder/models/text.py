"""Texts to vectors by the text tower of a model that has one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.family import Settings, TextTower
from fxsplit_encoder.models.load import load_tower, read_family

Tokens = tuple[int, ...]
"""The ids of a text, cut to the longest that the model takes."""


def text_tower(checkpoint: Checkpoint) -> tuple[TextTower, Settings]:
    """The text tower of a checkpoint, and its config.json; raises InputError: it has none."""
    family, settings = read_family(checkpoint)
    if family.text is None:
        raise InputError(f"{checkpoint.model}: a model without a text tower")
    return family.text, settings


class Tokenizer:
    """Turns texts into token ids as a checkpoint's own tokenizer does, on any thread.

    Args:
        checkpoint: of a model with a text tower.

    Raises:
        InputError: the model has no text tower, or its tokenizer cannot be loaded.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers import AutoTokenizer

        tower, settings = text_tower(checkpoint)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                checkpoint.directory or checkpoint.model, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise InputError(f"{checkpoint.model}: its tokenizer cannot be loaded: {error}") from None
        text = settings.get("text_config", settings)
        self._pads_to_most = tower.padding == "max_length"
        self.max_tokens: int = text.get("max_position_embeddings", 64 if self._pads_to_most else 77)
        self._lock = threading.Lock()  # the tokenizer keeps padding and truncation of its last call

    def __call__(self, text: str) -> Tokens:
        """The ids of a text, as many as the tower takes at most."""
        options = {"padding": "max_length"} if self._pads_to_most else {}
        with self._lock:
            made = self._tokenizer(text, truncation=True, max_length=self.max_tokens, **options)
        return tuple(made["input_ids"])

    @property
    def padding_id(self) -> int:
        """Returns the token id that pads shorter texts of a batch."""
        return int(self._tokenizer.pad_token_id or 0)


class TextEncoder:
    """The text tower of a checkpoint.

    Args:
        checkpoint: of a model with a text tower.
        dtype: of the tower.
        device: on which it encodes.
        padding_id: of the tokenizer.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, padding_id: int
    ) -> None:
        text, _ = text_tower(checkpoint)
        self._tower: Any = load_tower(checkpoint, dtype, device, text.tower)
        self._output = text.output
        self._masks = text.padding == "longest"
        self._device = device
        self._padding_id = padding_id

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Tokens]) -> Tensor:
        """(texts, width): the model's own vectors, on the device."""
        longest = max(map(len, texts))
        rows = [[*text, *[self._padding_id] * (longest - len(text))] for text in texts]
        ids = torch.tensor(rows, device="cpu").to(self._device)
        options = {}
        if self._masks:
            lengths = torch.tensor([len(text) for text in texts], device="cpu").to(self._device)
            options["attention_mask"] = torch.arange(longest, device=self._device) < lengths[:, None]
        vectors: Tensor = getattr(self._tower(input_ids=ids, **options), self._output)
        return vectors
