"""What stands in vLLM's modules in place of its manager until a runner makes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from fxsplit_encoder.integrations.vllm.log import warn_once
from fxsplit_encoder.integrations.vllm.settings import PluginSettings


class StandIn:
    """Makes this library's manager when it is called.

    vLLM loads plugins in each of its processes, and most of them never make a manager: those need not wait
    for the imports that one takes.
    """

    vllm_class: ClassVar[Callable[..., Any]]
    """vLLM's own."""
    settings: ClassVar[PluginSettings]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A `VllmEncoderManager`; vLLM's own manager if this library cannot be imported."""
        try:
            from fxsplit_encoder.integrations.vllm.adapter import make_adapter
        except Exception as error:
            warn_once(
                "vLLM's own manager captures the encoder, since fxsplit_encoder could not be imported: "
                f"{type(error).__name__}: {error}"
            )
            return cls.vllm_class(*args, **kwargs)
        return make_adapter(cls.vllm_class, cls.settings)(*args, **kwargs)


def make_stand_in(vllm_class: type, settings: PluginSettings) -> type[StandIn]:
    """The class that takes the place of vLLM's."""
    return type(vllm_class.__name__, (StandIn,), {"vllm_class": vllm_class, "settings": settings})
