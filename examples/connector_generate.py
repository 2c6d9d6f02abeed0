"""A small engine that generates with images while the connector encodes them beside it.

    python examples/connector_generate.py
    python examples/connector_generate.py --tokens 32 --chunk 48

The model is Qwen3-VL as transformers has it, tiny, with seeded random weights: what it says means nothing,
but it says the same as `model.generate`, which is checked at the end. A prompt's tokens are the bytes of its
text.

`Engine` is what a serving engine has to do: count the tokens of a request when it arrives, ask the connector
once a step, prefill in chunks, release features after the prefill, hold them again after a preemption. Each
request is a forward pass of its own here; a real engine batches them.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3VLConfig, Qwen3VLForConditionalGeneration

import fxsplit_encoder as fx
from fxsplit_encoder.connector.books.tickets import Ticket
from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.interfaces import MediaItem
from fxsplit_encoder.connector.keys import TowerIdentity, precision_of
from fxsplit_encoder.connector.manager_encoder import ManagerEncoder
from fxsplit_encoder.connector.positions import MergedRows, Placeholder, PositionMap
from fxsplit_encoder.connector.request import ConnectorConfig, EncodeRequest
from fxsplit_encoder.models.media import family_processor
from fxsplit_encoder.models.prepare import ProcessorSettings
from fxsplit_encoder.models.random import draw_weights
from fxsplit_encoder.models.registry import FAMILIES

IMAGES = Path(__file__).parent / "images"
VISION_START, IMAGE, VIDEO, VISION_END = range(256, 260)

REQUESTS: dict[str, list[str | Path]] = {
    "one image": ["What is this? ", IMAGES / "cat.jpg"],
    "text alone": ["Once upon a time"],
    "two images": [IMAGES / "rocket.jpg", " or ", IMAGES / "coffee.jpg", ": which is hot?"],
    "an image again": [IMAGES / "cat.jpg", IMAGES / "cat.jpg", " Are these the same?"],
    "more text": ["The quick brown fox"],
}
"""By name: texts and images, in the order of the prompt."""


# --- the model and its prompts


def tiny_model() -> Any:
    """Qwen3-VL with deepstack, two blocks of a tower and three layers of a decoder."""
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64}
    text = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    config = Qwen3VLConfig(
        vision_config={**vision, "deepstack_visual_indexes": [0, 1]},
        text_config={**text, **heads, "rope_parameters": rope, "pad_token_id": 0},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    model = Qwen3VLForConditionalGeneration(config).requires_grad_(False).eval()
    draw_weights(model, seed=0)
    for merger in (model.model.visual.merger, *model.model.visual.deepstack_merger_list):
        merger.linear_fc2.weight.mul_(8)  # or one image would be to the decoder as any other
    return model


def tokenize(prompt: Sequence[str | Path]) -> list[int]:
    """Bytes as tokens, and one placeholder for each image."""
    ids: list[int] = []
    for part in prompt:
        ids += part.encode() if isinstance(part, str) else [VISION_START, IMAGE, VISION_END]
    return ids


# --- the engine


@dataclass(eq=False)
class Generation:
    """One request that is served."""

    name: str
    placeholders: PositionMap
    ticket: Ticket
    max_new: int
    ids: list[int] = field(default_factory=list)
    """The prompt, a token for every row of an image, and what was generated."""
    computed: int = 0
    """How many of them are in the cache."""
    cache: Any = field(default_factory=DynamicCache)
    positions: Tensor | None = None
    """(3, prompt): the rotary positions of the prompt: time, height, width."""

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt, which the blocks of the cache are reserved for on arrival."""
        return self.placeholders.merged_length(self.ticket.token_counts)

    @property
    def generated(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def is_done(self) -> bool:
        return len(self.generated) == self.max_new


class Engine:
    """Greedy generation, one forward pass for every request in every step.

    Args:
        model: its vision tower is not used.
        connector: encodes the images.
        chunk: tokens of a prompt in one step.
    """

    def __init__(self, model: Any, connector: Connector, chunk: int) -> None:
        self._model = model
        self._connector = connector
        self._chunk = chunk
        self._waiting: dict[Ticket, Generation] = {}
        self._running: list[Generation] = []
        self.failed: dict[str, Exception] = {}

    def submit(self, name: str, prompt: Sequence[str | Path], max_new: int) -> Generation:
        """Returns at once; the length of the prompt is known."""
        media = [MediaItem("image", part) for part in prompt if isinstance(part, Path)]
        image = Placeholder(IMAGE, VISION_START, VISION_END)
        placeholders = PositionMap(tokenize(prompt), ["image"] * len(media), {"image": image})
        ticket = self._connector.submit(EncodeRequest(name, media, placeholders))
        generation = Generation(name, placeholders, ticket, max_new)
        self._waiting[ticket] = generation
        return generation

    def run(self) -> None:
        """Until every request is answered or has failed."""
        while self._waiting or self._running:
            if not self.step():
                for ticket in [*self._waiting][:1]:
                    ticket.wait(0.01)  # there is nothing else to do

    @torch.no_grad()
    def step(self) -> int:
        """How many requests went on. Those whose images are being encoded hold up nobody."""
        told = self._connector.step()
        for ticket in told.unavailable:
            self.failed[self._waiting.pop(ticket).name] = ticket.error or RuntimeError("cancelled")
        for ticket in self._waiting.keys() & set(told.ready):
            generation = self._waiting.pop(ticket)
            self._begin(generation)
            self._running.append(generation)
        for generation in self._running:
            self._forward(generation)
        going_on = len(self._running)
        self._running = [generation for generation in self._running if not generation.is_done]
        return going_on

    def preempt(self, generation: Generation) -> None:
        """Gives up the cache of a request that runs; it is computed again once its images are there."""
        was_released = generation.computed >= generation.prompt_length
        generation.cache, generation.computed = DynamicCache(), 0
        if was_released and self._connector.hold(generation.ticket) != "ready":
            self._running.remove(generation)
            self._waiting[generation.ticket] = generation

    def _begin(self, generation: Generation) -> None:
        if generation.positions is None:
            ticket = generation.ticket
            generation.ids = generation.placeholders.token_ids(ticket.token_counts).tolist()
            grids = [ticket.metadata(item)["grid"] for item in range(len(ticket.items))]
            ids = torch.tensor([generation.ids])
            positions, _ = self._model.model.get_rope_index(
                ids, (ids == IMAGE).int(), torch.tensor(grids) if grids else None
            )
            generation.positions = positions[:, 0]

    def _forward(self, generation: Generation) -> None:
        """The next chunk of the prompt, or the last token; after the last chunk a token is there."""
        start, device = generation.computed, self._model.device
        stop = min(start + self._chunk, len(generation.ids))
        ids = torch.tensor(generation.ids[start:stop], device=device)
        embeddings = self._model.get_input_embeddings()(ids)
        deepstack: dict[str, Any] = {}
        end = generation.prompt_length
        if start < end:
            merged = self._connector.merge(
                generation.ticket, (start, min(stop, end)), embeddings[: end - start]
            )
            deepstack = _deepstack(merged, embeddings)
        output = self._model.model.language_model(
            inputs_embeds=embeddings[None],
            position_ids=_positions(generation, start, stop)[:, None].to(device),
            past_key_values=generation.cache,
            use_cache=True,
            **deepstack,
        )
        generation.computed = stop
        if start < end <= stop:
            self._connector.release(generation.ticket)
        if stop == len(generation.ids):
            logits = self._model.lm_head(output.last_hidden_state[0, -1])
            generation.ids.append(int(logits.argmax()))


def _deepstack(merged: MergedRows, embeddings: Tensor) -> dict[str, Any]:
    """What the first layers of the decoder add to the rows of images; nothing in a chunk without any."""
    if not len(merged.positions):
        return {}
    mask = torch.zeros(len(embeddings), dtype=torch.bool, device=embeddings.device)
    mask[merged.positions] = True
    return {"visual_pos_masks": mask[None], "deepstack_visual_embeds": list(merged.levels)}


def _positions(generation: Generation, start: int, stop: int) -> Tensor:
    """(3, stop - start): those of the prompt, and from its largest on one by one."""
    prompt = generation.positions
    assert prompt is not None
    further = int(prompt.max()) + 1 + torch.arange(max(0, stop - prompt.shape[1]))
    return torch.cat([prompt, further.expand(3, -1)], dim=1)[:, start:stop]


# --- the connector


def image_processor() -> Any:
    """As a checkpoint has it."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
    return Qwen2VLImageProcessorPil(patch_size=16, size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)


def make_connector(model: Any, processor: Any) -> Connector:
    """One worker, with a manager of the model's own tower."""
    family, settings = FAMILIES["qwen3_vl"], model.config.to_dict()
    tower = family.wrap(model.model.visual)
    limits = {"token_budgets": (16, 64), "max_items_per_batch": 4, "max_frames_per_batch": 0}
    config = fx.EncoderConfig(**limits, mode="full", piece_compiler="eager")

    def encoder() -> ManagerEncoder:
        return ManagerEncoder(fx.EncoderCudaGraphManager(tower, config, log_interval=0), modalities=["image"])

    media = family_processor(tower, family, settings, ProcessorSettings(image=processor.to_dict()))
    return Connector(
        media,
        [encoder],
        ConnectorConfig(timeout_s=600),  # the first images wait for the tower to be captured
        identity=TowerIdentity.of(tower, precision_of(config)),
    )


def expected_tokens(model: Any, processor: Any, prompt: Sequence[str | Path], max_new: int) -> list[int]:
    """What `model.generate` says, which encodes the images itself, one request at a time."""
    from PIL import Image

    images = [Image.open(part).convert("RGB") for part in prompt if isinstance(part, Path)]
    inputs = dict(processor(images=images, return_tensors="pt")) if images else {}
    counts = [int(grid.prod()) // 4 for grid in inputs.get("image_grid_thw", ())]
    ids = [token for token in tokenize(prompt) for _ in range(counts.pop(0) if token == IMAGE else 1)]
    inputs["input_ids"] = torch.tensor([ids])
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).int()
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new)
    return output[0, len(ids) :].tolist()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16, help="generated for each request")
    parser.add_argument("--chunk", type=int, default=24, help="tokens of a prompt in one step")
    given = parser.parse_args(arguments)

    processor, model = image_processor(), tiny_model().to("cuda" if torch.cuda.is_available() else "cpu")
    alone = copy.deepcopy(model)  # the connector's tower is changed by being wrapped
    with make_connector(model, processor) as connector:
        engine = Engine(model, connector, given.chunk)
        served = {name: engine.submit(name, prompt, given.tokens) for name, prompt in REQUESTS.items()}
        for generation in served.values():
            print(f"{generation.name}: {generation.prompt_length} tokens, {generation.ticket.state}")
        engine.run()
        print(f"\n{connector.stats()}\n")
    wrong = 0
    for name, prompt in REQUESTS.items():
        is_equal = served[name].generated == expected_tokens(alone, processor, prompt, given.tokens)
        wrong += not is_equal
        print(f"{name}: {served[name].generated} {'as' if is_equal else 'NOT as'} model.generate says")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
