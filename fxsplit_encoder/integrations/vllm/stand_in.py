"""What stands in vLLM's modules in place of its manager until a runner makes one."""

from __future__ import annotations

from typing import Any, ClassVar

from fxsplit_encoder.integrations.vllm.log import warn_once
from fxsplit_encoder.integrations.vllm.settings import PluginSettings


class StandIn:
    """Makes this library's manager when it is called. `make_stand_in` derives it from vLLM's own as well, so
    that a class which others derive from it has vLLM's methods, and its own win over them.

    vLLM loads plugins in each of its processes, and most of them never make a manager: those need not wait
    for the imports that one takes.
    """

    settings: ClassVar[PluginSettings]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A `VllmEncoderManager`; vLLM's own manager if this library cannot be imported; of a class that is
        derived from this one an object of that class.
        """
        if StandIn not in cls.__bases__:
            warn_once(
                f"{cls.__module__}.{cls.__qualname__} captures the encoder: fxsplit_encoder does not replace "
                "classes that are derived from vLLM's manager"
            )
            return object.__new__(cls)
        try:
            from fxsplit_encoder.integrations.vllm.adapter import make_adapter
        except Exception as error:
            warn_once(
                "vLLM's own manager captures the encoder, since fxsplit_encoder could not be imported: "
                f"{type(error).__name__}: {error}"
            )
            return object.__new__(cls)
        return object.__new__(make_adapter(cls, cls.settings))


def make_stand_in(vllm_class: type, settings: PluginSettings) -> type[StandIn]:
    """The class that takes the place of vLLM's."""
    return type(vllm_class.__name__, (StandIn, vllm_class), {"settings": settings})
