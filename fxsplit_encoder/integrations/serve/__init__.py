"""A Ray Serve application that turns images into embeddings over HTTP.

`serve run fxsplit_encoder.integrations.serve:app model=NAME` starts it. Needs the extra `ray`.
"""

from fxsplit_encoder.integrations.serve.application import app
from fxsplit_encoder.integrations.serve.requests import ServiceSettings

__all__ = ["ServiceSettings", "app"]
