"""Images to embeddings by the tower of one checkpoint: what Ray's actors and the service have in common."""

from fxsplit_encoder.integrations.images.encoder import ImageEncoder, Result, results_of
from fxsplit_encoder.integrations.images.preparer import (
    ImageEncoderSettings,
    ImagePreparer,
    PreparedImage,
    ServingSettings,
)

__all__ = [
    "ImageEncoder",
    "ImageEncoderSettings",
    "ImagePreparer",
    "PreparedImage",
    "Result",
    "ServingSettings",
    "results_of",
]
