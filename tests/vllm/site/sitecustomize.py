"""Lets torchvision's Python code be imported beside a torch that its compiled library does not fit.

Python imports this at its start, wherever this directory is on PYTHONPATH: vLLM starts processes of its own.
Image processors need torchvision's functions, which are Python; its import needs two compiled operators to
exist, which nothing here calls.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder

_OPERATORS = ("nms", "qnms")
_declared = []


class _BeforeTorchvision:
    """Declares the operators when torchvision is looked for, and finds nothing."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(_BeforeTorchvision)
            _declare_missing()
        return None


def _declare_missing() -> None:
    import torch

    spec = PathFinder.find_spec("torchvision")
    for directory in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            torch.ops.load_library(f"{directory}/_C.so")
            return
        except OSError:
            pass
    library = torch.library.Library("torchvision", "DEF")
    for name in _OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)


sys.meta_path.insert(0, _BeforeTorchvision)
