"""From media to one tower's inputs: how many rows it will have, what identifies it, and what is encoded.

What a model's own processor does is its `Preparation`; how many output tokens that makes is the tower's own
arithmetic. Nothing here keeps state but preparations, so threads share a processor.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from fxsplit_encoder.connector.keys import HashName, Part, canonical, digest_of, item_digest
from fxsplit_encoder.connector.media import (
    MediaLimits,
    VideoHeader,
    frame_seconds,
    is_encoded,
    load_image,
    measure_image,
    open_video,
    pixel_bytes,
    read_source,
)
from fxsplit_encoder.connector.media.sources import attempt
from fxsplit_encoder.connector.options import SAMPLING, OptionCheck, check_options, integers
from fxsplit_encoder.connector.preparation import Inputs, Preparation, Prepare
from fxsplit_encoder.connector.seams import MediaItem, PreparedItem
from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.messages import shown

_MOST_PREPARATIONS = 64


class TowerProcessor:
    """Images and videos to the inputs of one tower.

    Args:
        tower: what `wrap` returns; its weights are never read, so it may lie on the meta device.
        prepare: the model's preparation with the arguments of an item, which were checked by name.
        fingerprint: of the model's processor: equal ones make equal inputs of equal media.
        limits: for every item.
        hash_name: of the function for digests.
    """

    def __init__(
        self,
        tower: Any,
        prepare: Prepare,
        fingerprint: bytes,
        limits: MediaLimits | None = None,
        hash_name: HashName = "blake3",
    ) -> None:
        digest_of([], hash_name)  # a missing package is found here
        self.tower = tower
        self.limits = limits or MediaLimits()
        self.fingerprint = fingerprint
        self.hash_name: HashName = hash_name
        self._prepare = prepare
        self._preparations: OrderedDict[bytes, Preparation] = OrderedDict()
        self._lock = threading.Lock()
        plain = prepare("image", {})
        self._options: dict[str, Mapping[str, OptionCheck]] = {"image": integers(plain.image_options)}
        if plain.takes_clips:
            self._options["video"] = {**SAMPLING, **integers(plain.clip_options)}
        levels = getattr(tower, "deepstack_levels", 0)
        columns = tower.get_encoder_cudagraph_config().out_hidden_size
        self._facts = {"hidden_size": columns // (1 + levels), "deepstack_levels": levels}

    # --- the seam

    def count_tokens(self, item: MediaItem) -> int:
        """Rows of the item's feature, from its header or its shape; nothing is decoded or hashed.

        Raises:
            MediaError: it is nothing that this model takes, or is beyond a limit.
        """
        preparation = self._preparation(item)
        if item.modality == "image":
            width, height = measure_image(item.media, self.limits)
            return self._count([preparation.image_sizes(width, height)])
        with closing(open_video(item.media, self.limits)) as video:
            return self._count(_clip_sizes(preparation, video.header))

    def digest(self, item: MediaItem) -> bytes:
        """What identifies the item once it is prepared, without preparing it: equal digests, equal inputs.

        Raises:
            MediaError: it cannot be read.
        """
        media = read_source(item.media, self.limits)
        if is_encoded(media):
            return self._digest(item, [media])
        if item.modality == "image":
            return self._digest(item, pixel_bytes(load_image(media, self.limits)))
        with closing(open_video(media, self.limits)) as video:
            return self._digest(item, video.parts())

    def prepare(self, item: MediaItem) -> PreparedItem:
        """Read, hash, decode and preprocess one item. Its inputs are on the CPU.

        Raises:
            MediaError: it cannot be decoded, or is beyond a limit.
        """
        preparation = self._preparation(item)
        item = replace(item, media=read_source(item.media, self.limits))
        prepare = self._prepare_image if item.modality == "image" else self._prepare_video
        return prepare(item, preparation)

    # --- modalities

    def _prepare_image(self, item: MediaItem, preparation: Preparation) -> PreparedItem:
        width, height = measure_image(item.media, self.limits)
        count = self._count([preparation.image_sizes(width, height)])
        image = load_image(item.media, self.limits)
        parts = [item.media] if is_encoded(item.media) else pixel_bytes(image)
        with attempt("image", "what the model takes"):
            inputs = [preparation.image(image)]
        return self._item(item, self._digest(item, parts), count, inputs, {})

    def _prepare_video(self, item: MediaItem, preparation: Preparation) -> PreparedItem:
        with closing(open_video(item.media, self.limits)) as video:
            header = video.header
            count = self._count(_clip_sizes(preparation, header))
            indices = preparation.sample(header.num_frames, header.fps)
            frames = video.select(indices, self.limits)
            parts = [item.media] if is_encoded(item.media) else video.parts()
            digest = self._digest(item, parts)
            with attempt("video", "what the model takes"):
                inputs = preparation.clip(frames)
        seconds = frame_seconds(indices, header, preparation.frames_per_step)
        return self._item(item, digest, count, inputs, seconds)

    def _item(
        self,
        item: MediaItem,
        digest: bytes,
        count: int,
        inputs: Sequence[Inputs],
        facts: Mapping[str, object],
    ) -> PreparedItem:
        made = self._count(inputs)
        if made != count:
            raise MediaError(
                f"{item.modality}: its processor makes {made} rows of it, where its size says {count}; the "
                "processor cuts images in a way that is not known here"
            )
        layouts = [part.layout for part in inputs]
        layout = layouts[0] if len(layouts) == 1 else {"parts": layouts}
        return PreparedItem(item.modality, digest, _joined(inputs), count, {**self._facts, **layout, **facts})

    # --- what both have

    def _preparation(self, item: MediaItem) -> Preparation:
        """That of an item's options; those of the latest options are kept."""
        if item.modality not in self._options:
            expected = " or ".join(self._options)
            raise MediaError(
                f"modality: expected {expected}, which the model takes; got {shown(item.modality)}"
            )
        check_options(item.options, self._options[item.modality])
        key = canonical([item.modality, item.options])
        with self._lock:
            found = self._preparations.get(key)
            if found is None:
                with attempt("options", "options of the processor"):
                    found = self._prepare(item.modality, item.options)
                self._preparations[key] = found
                if len(self._preparations) > _MOST_PREPARATIONS:
                    self._preparations.popitem(last=False)
            self._preparations.move_to_end(key)
        return found

    def _count(self, inputs: Sequence[Inputs]) -> int:
        """Rows by the tower's own arithmetic."""
        specs = self.tower.get_encoder_cudagraph_item_specs
        count = sum(spec.output_tokens for part in inputs for spec in specs(dict(part.tensors)))
        self.limits.check("max_tokens", count, "its feature")
        return count

    def _digest(self, item: MediaItem, parts: Iterable[Part]) -> bytes:
        media = digest_of(parts, self.hash_name)
        fingerprint = digest_of([item.modality.encode(), self.fingerprint], self.hash_name)
        return item_digest(media, fingerprint, item.options, self.hash_name)


def _clip_sizes(preparation: Preparation, header: VideoHeader) -> Sequence[Inputs]:
    indices = preparation.sample(header.num_frames, header.fps)
    return preparation.clip_sizes(len(indices), header.width, header.height)


def _joined(inputs: Sequence[Inputs]) -> dict[str, torch.Tensor]:
    """The tensors of several items of the tower, one after the other."""
    if len(inputs) == 1:
        return dict(inputs[0].tensors)
    return {name: torch.cat([part.tensors[name] for part in inputs]) for name in inputs[0].tensors}
