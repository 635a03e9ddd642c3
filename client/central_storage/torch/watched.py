"""In the script: what happens to modules whose copies replicas have.

Hooks, and attributes that are numbers, texts or tensors, follow the script: the function is sent again. Other parts and
other values of buffers are errors, because the server would not have them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from cs_proto.errors import InvalidArgumentError

from .buffers import central_buffers
from .parameters import HOOKS

__all__ = ["Watched"]

_HOOKS_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Attributes of modules that follow the script.
_PLAIN = (bool, int, float, complex, str, tuple, torch.Tensor, type(None))


class Watched:
    """The parts and attributes of modules in the script, of which replicas have copies."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self._modules = modules
        self._buffers = central_buffers(modules)
        self._parts = self._present_parts()
        self._parameters = [p for m in modules for p in m.parameters(recurse=False)]
        self._attributes = [dict(vars(m)) for m in modules]
        self._hooks = self._present_hooks()
        self._version = 0

    def _present_parts(self) -> list[Any]:
        parts: list[Any] = []
        for m in self._modules:
            parts += m._modules.values()  # noqa: SLF001
            parts += m._parameters.values()  # noqa: SLF001
            parts += m._buffers  # noqa: SLF001  (their names: the values are watched below)
        return parts

    def _present_hooks(self) -> list[int]:
        """The numbers of all hooks: torch gives each another."""
        tables = [getattr(m, name) for m in self._modules for name in _HOOKS_OF_MODULES]
        tables += [getattr(p, name) for p in self._parameters for name in HOOKS]
        return [number for table in tables if table for number in table]

    def check(self) -> None:
        """Raise InvalidArgumentError for parts that came, went or were exchanged, and for buffers that were written."""
        parts = self._present_parts()
        if len(parts) != len(self._parts) or not all(map(operator.is_, parts, self._parts)):
            raise InvalidArgumentError(
                "a module, parameter or buffer has been added, removed or exchanged since the function was decorated; "
                "change the module before cst.centralize, or centralize the new part and decorate the function again"
            )
        for each in self._buffers:
            each.check()

    def version(self) -> int:
        """A number that changes with the attributes and the hooks."""
        if (hooks := self._present_hooks()) != self._hooks:
            self._hooks = hooks
            self._version += 1
        for index, m in enumerate(self._modules):
            known, present = self._attributes[index], vars(m)
            if len(known) != len(present) or not all(map(operator.is_, known.values(), present.values())):
                changed = {key for key in known.keys() | present.keys() if _differ(known.get(key), present.get(key))}
                self._attributes[index] = dict(present)
                self._version += bool(changed - {"training"})
        return self._version


def _differ(known: Any, present: Any) -> bool:
    """Whether an attribute has another value that is plain."""
    if known is present or not isinstance(present, _PLAIN):
        return False
    if isinstance(present, torch.Tensor | tuple) or type(known) is not type(present):
        return True
    return bool(known != present)
