"""Images on a Ray cluster: for `ray.data`, as a run that can be resumed, and in actors of the connector."""

from fxsplit_encoder.service.ray.encode_images import EncodeImages, encode_images, prepare_images
from fxsplit_encoder.service.ray.job import EncodeJob, Outcome
from fxsplit_encoder.service.ray.ray_encoder import RayEncoder, RayOptions

__all__ = [
    "EncodeImages",
    "EncodeJob",
    "Outcome",
    "RayEncoder",
    "RayOptions",
    "encode_images",
    "prepare_images",
]
