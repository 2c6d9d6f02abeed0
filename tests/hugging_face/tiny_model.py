"""What the table of tiny models says of each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

# --- prompts: places for images and videos, padded on the left into a batch

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


# --- models

Item = Any
"""What an image or a video is to its model: a grid, a size, a number of tiles."""

Pixels = Callable[[Sequence[Item], Sequence[Item], torch.Generator], dict[str, Any]]
"""From images and videos to the model's inputs beside tokens."""


@dataclass(frozen=True)
class TinyModel:
    """A model with a language model of one layer, and a tower of two blocks."""

    family: str
    """What its classes in transformers begin with."""
    arguments: dict[str, Any]
    """Of its configuration."""
    pixels: Pixels
    image_runs: Callable[[Item], Runs]
    """The tokens that stand for an image."""
    images: tuple[Item, Item, Item]
    """Three images, each of which it takes."""
    video_runs: Callable[[Item], Runs] | None = None
    """The same of a video; None: it takes none."""
    video: Item = None
    features: Callable[[Any, dict[str, Any]], Any] = lambda model, inputs: model.get_image_features(**inputs)
    """The model's own method, on what `pixels` makes of images."""
    embeds: bool = False
    """Whether it gives embeddings, and has no language model."""
    token_types: bool = False
    """Whether it wants to be told which tokens are an image's."""
    exhaustive: bool = False
    """Whether `make test-all` alone captures it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """How it is captured, in what differs from the others."""

    @property
    def kind(self) -> Any:
        """Its class."""
        suffix = "Model" if self.embeds else "ForConditionalGeneration"
        return getattr(transformers, f"{self.family}{suffix}")

    def config(self) -> Any:
        return getattr(transformers, f"{self.family}Config")(**copy.deepcopy(self.arguments))

    def make(self, directory: Path) -> None:
        """Saves a checkpoint with random weights, as transformers does it."""
        torch.manual_seed(0)
        model = self.kind(self.config())
        randomize(model)
        model.save_pretrained(directory)

    def load(self, directory: Path) -> Any:
        """The model of a checkpoint, as transformers loads it."""
        return self.kind.from_pretrained(directory).eval()

    def inputs(
        self, sequences: Sequence[Sequence[Item]], videos: Sequence[Item] = (), seed: int = 0
    ) -> dict[str, Any]:
        """Arguments of `generate`: for every sequence its images, then, in the last one, the videos."""
        generator = torch.Generator().manual_seed(seed)
        runs: list[list[Runs]] = [[self.image_runs(image) for image in images] for images in sequences]
        if videos:
            assert self.video_runs is not None
            runs[-1] += [self.video_runs(video) for video in videos]
        inputs: dict[str, Any] = batch([sequence(items, n) for n, items in enumerate(runs)])
        images = [image for one in sequences for image in one]
        if self.token_types:
            ids = inputs["input_ids"]
            inputs["mm_token_type_ids"] = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
        return {**inputs, **(self.pixels(images, videos, generator) if images or videos else {})}

    def image_inputs(self, images: Sequence[Item], seed: int = 0) -> dict[str, Any]:
        """Arguments of the model's own features of images."""
        return self.pixels(images, (), torch.Generator().manual_seed(seed))


def randomize(model: nn.Module) -> None:
    """Weights that let what a tower sees reach the tokens, none of them faint."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                fan = parameter.numel() // max(1, parameter.shape[0])
                parameter.normal_(0, 1 / max(fan, 4) ** 0.5, generator=generator)
            elif "bias" in name:
                parameter.normal_(0, 0.1, generator=generator)
