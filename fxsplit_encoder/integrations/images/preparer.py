"""Images to a tower's inputs on the host, pixels as uint8: a quarter of what they take as floats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fxsplit_encoder.errors import InputError, MediaError
from fxsplit_encoder.integrations.images.settings import ImageEncoderSettings
from fxsplit_encoder.media import MediaLimits, load_image
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.later import normalization_of, pixel_table
from fxsplit_encoder.models.load import read_family
from fxsplit_encoder.models.prepare import Prepared

Array = NDArray[Any]


@dataclass(frozen=True)
class PreparedImage:
    """One image as the tower takes it, on the host.

    ``inputs`` are the tower's keyword arguments for this image alone. Those of uint8 are pixels, which the
    encoder normalizes by ``ImagePreparer.values``; floats are pixels that are normalized already; integers
    are grids and counts. ``layout`` says how the image was cut: "grid", "tiles" or "crops".
    """

    inputs: Mapping[str, Array]
    layout: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """Bytes of ``inputs``."""
        return sum(array.nbytes for array in self.inputs.values())


class ImagePreparer:
    """Decodes images and prepares them for the tower of a checkpoint, whose weights it does not read.

    Args:
        settings: the checkpoint, and the limits of an image.

    Raises:
        InputError: the checkpoint has no tower that is known.
    """

    def __init__(self, settings: ImageEncoderSettings) -> None:
        self._limits = MediaLimits(max_bytes=settings.max_image_bytes, max_pixels=settings.max_pixels)
        checkpoint = Checkpoint.locate(settings.model)
        family, config = read_family(checkpoint)
        processors = checkpoint.processors()
        self._whole = family.prepare(config, processors)
        self._later = family.prepare(config, processors.normalizing_later())
        self.values: NDArray[np.float32] = normalization_of(self._whole).values()
        """(channels, 256): what the encoder makes of each value of each channel."""

        self.normalizes_later = pixel_table(self._whole, self._later, "image") is not None
        """Whether pixels are uint8. Else this checkpoint's are not what `values` makes of them."""

    def load(self, media: bytes | memoryview | Array) -> PreparedImage:
        """An encoded image, the first of several in a file; or pixels of uint8, (height, width) or with 1, 3
        or 4 channels.

        Raises:
            MediaError: it cannot be decoded or prepared, or is beyond a limit.
        """
        return self.prepare(load_image(media, self._limits))

    def prepare(self, image: Image.Image) -> PreparedImage:
        """An upright RGB image.

        Raises:
            MediaError: it cannot be prepared, such as one that is too elongated.
        """
        try:
            return self._prepared(image)
        except (InputError, ValueError) as error:  # transformers' processors raise the latter
            raise MediaError(str(error)) from None

    def _prepared(self, image: Image.Image) -> PreparedImage:
        if not self.normalizes_later:
            return _as_arrays(self._whole.image(image))
        made = _as_arrays(self._later.image(image))
        # Some processors lay whole numbers out as floats.
        inputs = {name: a.astype(np.uint8) if a.dtype.kind == "f" else a for name, a in made.inputs.items()}
        return PreparedImage(inputs, made.layout)


def _as_arrays(prepared: Prepared) -> PreparedImage:
    return PreparedImage({name: t.numpy() for name, t in prepared.tensors.items()}, prepared.layout)
