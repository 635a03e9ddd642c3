"""Analysis of code: which modules are the user's own, and which names a function reads.

The user's own modules travel by value, so a worker never imports them: an import would run their top level once more,
and that may be the training script. The needed parts of such a module are found in bytecode, once for each code object.
This module knows nothing of pickling; ``central_storage.pickling.pickler`` uses it.
"""

from __future__ import annotations

import dis
import importlib.machinery
import os
import sys
import sysconfig
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from cs_proto.frozen import frozen

__all__ = ["Reads", "is_importable", "is_users", "reads_of", "submodules"]

# The project's own packages are installed with every worker, whatever folder they are run from.
_OURS = {"central_storage", "cs_proto", "cs_runtime", "cs_server", "cs_worker"}
_MAIN = {"__main__", "__mp_main__"}

_EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARIES = tuple(
    os.path.join(path, "")
    for directory in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)}
    for path in {directory, os.path.realpath(directory)}
)

_verdicts: dict[str, bool] = {}


def is_users(name: str) -> bool:
    """Whether the module called ``name`` is the user's own: ``__main__``, or one whose source lies outside the
    standard library, site-packages and this project. A module that cannot be imported again is, too."""
    verdict = _verdicts.get(name)
    if verdict is None:
        module = sys.modules.get(name)
        if module is None and name not in _MAIN:  # not cached: it may be imported later
            root = name.partition(".")[0]
            return root not in sys.modules or is_users(root)
        verdict = _verdicts[name] = name in _MAIN or _is_users(name, module)
    return verdict


def is_importable(thing: Any) -> bool:
    """Whether the module and qualified name of ``thing``, a function or class, lead to it in this process."""
    found: Any = sys.modules.get(thing.__module__ or "")
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is thing


@frozen
class Reads:
    """The names that a code object and those nested in it read.

    ``global_names``: the names looked up in the module's globals, in the order of the code. ``chains``: for each
    variable, the attribute chains that are read; ``pkg.model.forward(x)`` reads ``("model", "forward")`` of ``pkg``.
    ``escaping``: the variables that are also read as a whole. ``names``: every name used as an attribute.
    ``last_line``: the last line of the file from which the code was made.
    """

    global_names: tuple[str, ...]
    chains: dict[str, frozenset[tuple[str, ...]]]
    escaping: frozenset[str]
    names: frozenset[str]
    last_line: int


_reads: weakref.WeakKeyDictionary[CodeType, Reads] = weakref.WeakKeyDictionary()


def reads_of(code: CodeType) -> Reads:
    """The names that ``code`` reads; computed once."""
    found = _reads.get(code)
    if found is None:
        found = _reads[code] = _read(code)
    return found


def submodules(package: ModuleType, names: frozenset[str]) -> Iterator[str]:
    """The imported submodules of ``package`` that code using ``names`` may address as attributes: ``scipy.special``
    of ``scipy``. A worker that imports the package alone might not have them."""
    for name in sorted(names):
        full = f"{package.__name__}.{name}"
        module = sys.modules.get(full)
        if module is not None:
            yield full
            yield from submodules(module, names)


def _is_users(name: str, module: ModuleType | None) -> bool:
    root = name.partition(".")[0]
    if root in _OURS:
        return False
    path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if path is not None:
        return not (path.endswith(_EXTENSIONS) or path.startswith(_LIBRARIES) or _INSTALLED & {*Path(path).parts})
    # Without a file: built in or frozen; part of a library that makes modules; or made by the user's code.
    if getattr(module, "__spec__", None) is not None:
        return False
    return root == name or is_users(root)


# The body of a class reads possible globals with LOAD_NAME and its successors.
_GLOBAL = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_LOAD = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"} | {
    "LOAD_FROM_DICT_OR_GLOBALS",
    "LOAD_FROM_DICT_OR_DEREF",
}
_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "IMPORT_FROM"}


def _read(code: CodeType) -> Reads:
    global_names: dict[str, None] = {}  # a dict for its order: equal code gives equal pickles
    chains: dict[str, set[tuple[str, ...]]] = {}
    escaping: set[str] = set()
    names: set[str] = set()
    last_line = code.co_firstlineno
    for each in _nested(code):
        last_line = max(last_line, *(line for *_, line in each.co_lines() if line is not None))
        steps = [step for step in dis.get_instructions(each) if step.opname != "EXTENDED_ARG"]
        for place, step in enumerate(steps):
            if step.opname in _ATTRIBUTE:
                names.add(step.argval)
            if step.opname in _GLOBAL:
                global_names[step.argval] = None
            if step.opname in _LOAD:
                chain = _chain(steps, place + 1)
                if chain:
                    chains.setdefault(step.argval, set()).add(chain)
                else:
                    escaping.add(step.argval)
    frozen = {name: frozenset(found) for name, found in chains.items()}
    return Reads(tuple(global_names), frozen, frozenset(escaping), frozenset(names), last_line)


def _chain(steps: list[dis.Instruction], place: int) -> tuple[str, ...]:
    chain = []
    while place < len(steps) and steps[place].opname in _ATTRIBUTE:
        chain.append(steps[place].argval)
        place += 1
    return tuple(chain)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
