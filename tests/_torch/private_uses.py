"""Find which files reach into private parts of other packages.

A syntax tree says it, without running anything. Counted, annotations included, are:

- an import whose module or name has a part that begins with one underscore (`torch._inductor.config`,
  `torch.utils._pytree`), or lies in a part of Triton that it does not document (`triton.runtime`);
- a use of such a part through an imported name (`torch._C._cuda_releasePool`);
- a call of an op with such a name (`torch.ops.aten._flash_attention_forward.default(...)`). Where it is only
  mentioned it is what traced graphs hold, for which there is no other name, and not counted;
- an attribute with one leading underscore that this package defines nowhere (`node._erased`), got by a dot
  or by `getattr`, `hasattr` or `setattr` with its name; and `_cdata` and `_version` of anything but `self`.

The standard library is not looked at.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable

PACKAGE = "fxsplit_encoder"
_TRITON_INTERNALS = ("triton.runtime", "triton.compiler", "triton.backends")
_OPS = "torch.ops."
_OF_TENSORS = {"_cdata", "_version"}
_OF_NAMED_TUPLES = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}  # documented
_BY_NAME = {"delattr", "getattr", "hasattr", "setattr"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_list(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Starred)


def own_names(trees: Iterable[ast.AST]) -> frozenset[str]:
    """Every private name that the package itself gives to something."""
    names = {name for tree in trees for node in ast.walk(tree) if (name := _defined(node))}
    return frozenset(filter(_is_private, names))


def _defined(node: ast.AST) -> str | None:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Name(id=name, ctx=ast.Store()):
            return name
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
            return name
        case ast.alias(name=name, asname=alias) if "." not in name:
            return alias or name
    return None


Call = tuple[str, int, tuple[str, ...]]
"""What is called, with how many arguments by position, and with which by name."""


def private_uses(tree: ast.Module, own: frozenset[str]) -> tuple[set[str], set[Call]]:
    """What of other packages' private parts a file uses, as dotted names, or `._name` of some object; and how
    names that are imported, private or not, are called, but for arguments that are given as a list.
    """
    finder = _Finder(own)
    finder.visit(tree)
    return finder.uses, finder.calls


class _Finder(ast.NodeVisitor):
    def __init__(self, own: frozenset[str]) -> None:
        self.own = own
        self.uses: set[str] = set()
        self.calls: set[Call] = set()
        self.imported: dict[str, str] = {}
        """Local names of what is imported, or of its parts, and their dotted names."""

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._note_dotted(alias.name)
            root = alias.name.partition(".")[0]
            self.imported[alias.asname or root] = alias.name if alias.asname else root

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level:
            return
        for alias in node.names:
            dotted = f"{node.module}.{alias.name}"
            self._note_dotted(dotted)
            self.imported[alias.asname or alias.name] = dotted

    def visit_Assign(self, node: ast.Assign) -> None:
        dotted = self._dotted(node.value)
        if dotted is not None and isinstance(node.targets[0], ast.Name):
            self.imported[node.targets[0].id] = dotted
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = self._dotted(node)
        if dotted is not None and not dotted.startswith(f"{PACKAGE}."):
            if not dotted.startswith(_OPS):
                self._note_dotted(dotted)
            return
        is_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        self._note_attribute(node.attr, is_self)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = self._dotted(node.func)
        if called is not None and called.startswith(_OPS):
            self._note_dotted(called)
        keywords = [keyword.arg for keyword in node.keywords]
        if called is not None and None not in keywords and not any(map(_is_list, node.args)):
            self.calls.add((called, len(node.args), tuple(map(str, keywords))))
        match node:
            case ast.Call(func=ast.Name(id=name), args=[owner, ast.Constant(value=str(attribute)), *_]):
                if name in _BY_NAME:
                    self._note_attribute(attribute, isinstance(owner, ast.Name) and owner.id == "self")
        self.generic_visit(node)

    def _dotted(self, node: ast.expr) -> str | None:
        """The full name of a chain of attributes of something imported."""
        if isinstance(node, ast.Name):
            return self.imported.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := self._dotted(node.value)) is not None:
            return f"{owner}.{node.attr}"
        return None

    def _note_dotted(self, dotted: str) -> None:
        parts = dotted.split(".")
        if parts[0] == PACKAGE or parts[0] in sys.stdlib_module_names:
            return
        if any(map(_is_private, parts)) or f"{dotted}.".startswith(tuple(f"{i}." for i in _TRITON_INTERNALS)):
            self.uses.add(dotted)

    def _note_attribute(self, name: str, is_self: bool) -> None:
        if not _is_private(name) or name in _OF_NAMED_TUPLES or name.startswith("_fxsplit"):
            return
        if name not in self.own or (name in _OF_TENSORS and not is_self):
            self.uses.add(f".{name}")
