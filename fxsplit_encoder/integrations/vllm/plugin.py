"""The plugin: `register`, which vLLM calls in every one of its processes before it builds a model."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.integrations.vllm.compatibility import manager_problem, warn_once
from fxsplit_encoder.integrations.vllm.settings import read_plugin_settings

_NAME = "EncoderCudaGraphManager"

# The runner of the first generation imports the name from the first module when it makes a manager, that of
# the second holds it in the other, whose import may have come before this plugin or comes after it.
_MODULES = ("vllm.v1.worker.encoder_cudagraph", "vllm.v1.worker.gpu.model_states.interface")


def register() -> None:
    """Puts this library's manager in place of vLLM's, once. Never raises: with an unknown vLLM or wrong
    settings one warning says so, and vLLM is as it was.
    """
    try:
        settings = read_plugin_settings()
    except ConfigError as error:
        warn_once(f"fxsplit_encoder leaves vLLM as it is: {error}")
        return
    if not settings.enabled:
        return
    try:
        problem = _install(settings)
    except Exception as error:  # of vLLM's own imports, too: an engine must start without this plugin
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        warn_once(f"fxsplit_encoder leaves vLLM as it is, which it does not know: {problem}")


def _install(settings: EncoderConfig) -> str | None:
    """Installs the manager; returns why it could not be, or None."""
    from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph
    from vllm.v1.worker import encoder_cudagraph, encoder_cudagraph_defs

    original = getattr(encoder_cudagraph, _NAME, None)
    if original is None:
        return f"{encoder_cudagraph.__name__} has no {_NAME}"
    if issubclass(original, StandIn):
        return None
    if original.__module__ != encoder_cudagraph.__name__:
        return f"{_NAME} is {original.__module__}.{original.__qualname__}, which another plugin put there"
    problem = manager_problem(original, SupportsEncoderCudaGraph, encoder_cudagraph_defs)
    if problem is not None:
        return problem
    if settings.compile:
        if (problem := install_layers()) is not None:
            warn_once(f"fxsplit_encoder does not compile encoders: {problem}")
            settings = settings.replace(compile=False, piece_compiler="auto", passes="auto")
    _replace(original, make_stand_in(original, settings))
    return None


def install_layers() -> str | None:
    """Makes encoders that vLLM builds traceable; returns why they are not, or None."""
    from fxsplit_encoder.integrations.vllm import layers

    problem = layers.install_rotary() or layers.install_attention()
    if problem is None:
        layers.install_relative_positions()
        layers.install_input_norm()
    return problem


def _replace(original: Any, adapter: Any) -> None:
    for name in _MODULES:
        module = sys.modules.get(name)
        if module is not None and getattr(module, _NAME, None) is original:
            setattr(module, _NAME, adapter)


# --- what stands in vLLM's modules until a runner makes a manager


class StandIn:
    """Makes this library's manager when it is called, so that processes of vLLM that make none need not
    import it. `make_stand_in` derives it from vLLM's own too, for classes that others derive.
    """

    settings: ClassVar[EncoderConfig]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A `VllmEncoderManager`; vLLM's own if that cannot be imported; an object of a derived class as it
        is.
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


def make_stand_in(vllm_class: type, settings: EncoderConfig) -> type[StandIn]:
    """The class that takes the place of vLLM's."""
    return type(vllm_class.__name__, (StandIn, vllm_class), {"settings": settings})
