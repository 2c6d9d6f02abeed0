"""What a tiny whole model needs beside its tower."""

from __future__ import annotations

from typing import Any


def text_config(**sizes: Any) -> dict[str, Any]:
    """The least that a language model can be made with."""
    return {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 16,
        **sizes,
    }
