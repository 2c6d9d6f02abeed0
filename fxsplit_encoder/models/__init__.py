"""Published models: their vision towers built, loaded and run eagerly, and their images made to inputs.

Nothing that `import fxsplit_encoder` needs: this package takes the extra `hf`.
"""

import importlib

from fxsplit_encoder.errors import MissingExtraError

for _package in ("PIL", "safetensors", "transformers"):
    try:
        importlib.import_module(_package)
    except ModuleNotFoundError as error:
        if error.name != _package:
            raise
        raise MissingExtraError("fxsplit_encoder.models", "hf") from error
