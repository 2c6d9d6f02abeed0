"""Dynamo: marks of sizes, and the current compilation. Importing this does not load it."""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch._guards import CompileContext, TracingContext, detect_fake_mode

current_compile_id = CompileContext.current_compile_id
"""The id of Dynamo's current compilation, or None."""

# Attributes under which Dynamo's wrappers of a backend have what they wrap.
_WRAPPED = ("compiler_fn", "__wrapped__", "_torchdynamo_orig_backend")


def maybe_mark_dynamic(tensor: Tensor, dims: int | list[int]) -> None:
    """Lets sizes vary. torch.compile's documentation names this function, which no public module has."""
    from torch._dynamo import maybe_mark_dynamic

    maybe_mark_dynamic(tensor, dims)


def is_traced() -> bool:
    """Whether this thread traces; `torch.compiler.is_compiling` is true in every thread while one does."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch.compiler.is_compiling() and detect_fake_mode() is not None


class Marks:
    """Marks the first size of tensors as one that varies, and the others as constant. The first may become
    constant ("maybe") or is an error then ("dynamic"); a trace may not look at one that is "unbacked".
    """

    def __init__(self, first: Literal["dynamic", "maybe", "unbacked"]) -> None:
        self._first = first
        self._written: dict[int, dict[str, Any]] = {}

    def on_alias(self, tensor: Tensor) -> Tensor:
        """Returns an alias with the marks, which are copied from the first tensor of each rank."""
        alias = tensor.view_as(tensor)
        if type(alias) is not Tensor:  # theirs are on what a subclass is made of, too
            self._write(alias)
            return alias
        written = self._written.get(alias.dim())
        if written is None:
            self._write(alias)
            self._written[alias.dim()] = dict(vars(alias))
        else:
            vars(alias).update(written)
        return alias

    def _write(self, tensor: Tensor) -> None:
        from torch._dynamo import mark_dynamic, mark_static, maybe_mark_dynamic
        from torch._dynamo.decorators import mark_unbacked

        marks = {"dynamic": mark_dynamic, "maybe": maybe_mark_dynamic, "unbacked": mark_unbacked}
        marks[self._first](tensor, 0)
        mark_static(tensor, list(range(1, tensor.dim())))


def not_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that Dynamo does not trace, though it traces what the function calls."""
    # `torch.compiler.disable` alone takes two thirds of a call's Python time: it is asked again every time.
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)
    disabled: Callable[..., Any] = torch.compiler.disable(function, recursive=False)
    return disabled


def backends_in_use() -> Iterator[Any]:
    """Returns the backend of the current trace and those inside of its wrappers, outermost first."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return _unwrapped(InstructionTranslator.current_tx().output.compiler_fn)


def _unwrapped(backend: Any) -> Iterator[Any]:
    while backend is not None:
        yield backend
        inner = (getattr(backend, name, None) for name in _WRAPPED)
        backend = next((each for each in inner if each is not None), None)


def owners_of_trace() -> list[weakref.ref[Any]]:
    """Returns the owners of the graph from Dynamo, as `owners_of`: torch.compile's call, and the module."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        translator: Any = InstructionTranslator.current_tx()
    except AttributeError:
        return []  # a backend may be called by anybody
    found = [*_unwrapped(translator.output.compiler_fn), translator.output.root_tx.f_locals.get("self")]
    return [weakref.ref(each) for each in found if _is_own(each)]


def owners_of(compiled: Callable[..., Any]) -> list[Any]:
    """Returns the call of `torch.compile` that returned a module or a function, and the module."""
    context = getattr(compiled, "dynamo_ctx", None)
    if context is None and inspect.isfunction(compiled):
        callback = inspect.getclosurevars(compiled).nonlocals.get("callback")
    else:
        callback = getattr(context, "callback", None)
    return [each for each in (*_unwrapped(callback), original_module(compiled)) if _is_own(each)]


def drop_guards_on(paths: Collection[str], attribute: str, constants: str) -> None:
    """Removes guards of the current trace that the caller checks itself.

    Args:
        paths: the dotted names of all submodules of which the trace has read `attribute`, whose guards go; if
            it has read that of others, or does not tell, all stay.
        constants: an attribute with an object whose own attributes are compared by identity; its guards stay
            if the trace has read deeper.
    """
    context = TracingContext.try_get()
    guards = None if context is None else context.guards_context.dynamo_guards
    names = {guard: _source_name(guard) for guard in guards or ()}
    marked = {name.removesuffix(f".{attribute}") for name in names.values() if name.endswith(f".{attribute}")}
    inside = {"".join(f"._modules['{part}']" for part in path.split(".")) for path in paths}
    roots = {name.removesuffix(place) for name in marked for place in inside if name.endswith(place)}
    root = next((root for root in roots if {root + place for place in inside} == marked), None)
    if guards is None or root is None:
        return
    held = f"{root}.{constants}"
    dropped = [re.escape(name) + r"(\..*)?" for name in marked]
    if not any(re.fullmatch(re.escape(held) + r"\.\w+[.\[].*", name) for name in names.values()):
        # Its class has the code that reads it.
        dropped.append(rf"{re.escape(held)}(\..*)?|(dict\()?type\({re.escape(held)}\).*")
    is_dropped = re.compile("|".join(dropped)).fullmatch
    for guard, name in names.items():
        if is_dropped(name):
            guards.inner.discard(guard)


def _source_name(guard: Any) -> str:
    name = guard.originating_source.name  # a method in older versions
    return str(name() if callable(name) else name)


def _is_own(owner: Any) -> bool:
    # A backend's function belongs to every call of `torch.compile`.
    return owner is not None and not inspect.isroutine(owner) and hasattr(owner, "__weakref__")


def allow_no_frame() -> None:
    """Lets the current call end without a compiled frame, which is an error with `fullgraph=True`."""
    from torch._C._dynamo import eval_frame

    set_count = getattr(eval_frame, "set_fullgraph_compiled_frame_count", None)
    if set_count is None:  # an older torch
        return
    if set_count(0) < 0:
        set_count(-1)  # no such call is under way
        return
    with torch.inference_mode(False), torch.no_grad():
        _a_frame()(torch.zeros(1, dtype=torch.float32, device="cpu"))


@functools.cache
def _a_frame() -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(torch.neg, backend="eager", dynamic=False)


def inner_error(error: BaseException) -> BaseException | None:
    """Returns what an error of Dynamo's wraps: it raises some "from None", which leaves no `__cause__`."""
    found: BaseException | None = getattr(error, "inner_exception", None)
    return found


def traced_files(error: BaseException) -> list[str]:
    """Returns the files of the code that Dynamo was tracing when it raised, outermost first."""
    return [frame.filename for frame in getattr(error, "real_stack", None) or ()]


def is_compiled(function: Any) -> bool:
    """Whether `torch.compile` returned it, or it is a copy of that, which is without the first attribute."""
    return any(hasattr(function, name) for name in ("get_compiler_config", "dynamo_ctx"))


def original_module(compiled: Callable[..., Any]) -> Any:
    """Returns the module that `torch.compile` was given; anything else is returned as it is."""
    return getattr(compiled, "_orig_mod", compiled)
