"""Images on a Ray cluster: classes and functions for `ray.data`, and a run that survives being cut off.

Needs the extra `ray`.
"""

from fxsplit_encoder.integrations.ray.encode_images import EncodeImages, encode_images
from fxsplit_encoder.integrations.ray.job import EncodeJob
from fxsplit_encoder.integrations.ray.outcome import Outcome
from fxsplit_encoder.integrations.ray.prepare_images import prepare_images

__all__ = ["EncodeImages", "EncodeJob", "Outcome", "encode_images", "prepare_images"]
