"""The public names of the package, and what their docstrings lack.

``hooks.py`` makes the reference pages of the site from :func:`pages`, so no public name can be forgotten.
``tests/test_reference.py`` holds what :func:`missing` finds against a table that may only get shorter.
"""

from __future__ import annotations

import enum
import importlib.util
import inspect
import re
from collections.abc import Iterator
from types import ModuleType

import central_storage
from central_storage.core.public_objects import hidden

#: Classes whose objects a function or another object makes, so that nobody calls them with arguments.
MADE = {
    "jax.Narrow",
    "jax.Step",
    "jax.optim.GlobalNorm",
    "jax.optim.Optimizer",
    "Counters",
    "DistributedDataset",
    "DistributedIterator",
    "ReplicaContext",
    "StrategyExtended",
    "Tensor",
    "aio.Connecting",
    "aio.Observer",
    "data.Dataset",
    "data.DatasetIterator",
    "optimizers.Optimizer",
    "torch.CentralParameter",
}
#: Modules whose names are those of ``cs`` itself: their pages show none.
ALIASES = {"compat", "distribute"}
#: Packages for a framework, which have a page where the framework is installed. ``central_storage.__all__`` does not
#: name them.
FRAMEWORKS = [name for name in ("jax", "torch") if importlib.util.find_spec(name)]
#: Callables that take arguments and never raise.
HARMLESS = {
    "jax.optim.constant_schedule",
    "jax.optim.exponential_decay",
    "jax.optim.linear_schedule",
    "jax.optim.polynomial_schedule",
    "InputContext",
    "RunOptions",
    "StrategyExtended.value_container",
    "StrategyExtended.variable_created_in_scope",
    "ValueContext",
    "torch.optim.CentralOptimizer.zero_grad",
}


def pages() -> dict[str, list[tuple[str, object]]]:
    """The public names, each with what it stands for, by the page that shows them: one page for each name of
    ``central_storage.__all__`` and of ``FRAMEWORKS``, which for a module has all names of its ``__all__``."""
    found: dict[str, list[tuple[str, object]]] = {}
    for name in sorted([*central_storage.__all__, *FRAMEWORKS], key=str.lower):
        value = getattr(central_storage, name)
        found[name] = list(_names_of(name, value)) if inspect.ismodule(value) else [(name, value)]
    return found


def _names_of(prefix: str, module: ModuleType) -> Iterator[tuple[str, object]]:
    for name in () if prefix in ALIASES else module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value):
            if value.__name__.startswith("central_storage"):  # another library's module has its own reference
                yield from _names_of(f"{prefix}.{name}", value)
        else:
            yield f"{prefix}.{name}", value


def members(name: str, value: object) -> list[str] | None:
    """The members of a public class that a user may use, but for those that a public base has; None for an enum, and
    for what is no class, whose members are all shown."""
    if not inspect.isclass(value) or issubclass(value, enum.Enum):
        return None
    public = {each for names in pages().values() for _, each in names if inspect.isclass(each)}
    inherited = {member for base in value.__mro__[1:] if base in public for member in vars(base)}
    own = [base for base in reversed(value.__mro__) if base.__module__.startswith(("central_storage", "cs_proto"))]
    shown = dict.fromkeys(member for base in own for member in vars(base) if not member.startswith("_"))
    return [each for each in shown if each not in inherited and each not in hidden(value)]


def missing() -> dict[str, str]:
    """What the docstring of each public callable lacks: ``Args``, ``Raises``, ``Examples``.

    A callable that takes arguments needs a line for each of them, and ``Raises`` unless it is ``HARMLESS``. The
    examples of a class may be those of a method, too. Exceptions and
    enums are not called by users; a NamedTuple or dataclass is.
    """
    found = {}
    for names in pages().values():
        for name, value in names:
            if inspect.isclass(value) and not issubclass(value, BaseException | enum.Enum):
                found[name] = _lacks(value, value, name)
                for member in members(name, value) or ():
                    method = inspect.getattr_static(value, member)
                    function = method.__func__ if isinstance(method, staticmethod | classmethod) else method
                    if inspect.isfunction(function):
                        found[f"{name}.{member}"] = _lacks(function, value, f"{name}.{member}")
            elif inspect.isfunction(value):
                found[name] = _lacks(value, value, name)
    return {name: lacks for name, lacks in sorted(found.items()) if lacks}


def _lacks(function: object, owner: object, name: str) -> str:
    doc = inspect.getdoc(function) or ""
    taken = [
        each.name
        for each in inspect.signature(function).parameters.values()  # type: ignore[arg-type]
        if each.name not in ("self", "cls") and not each.name.startswith("_") and name not in MADE
    ]
    described = set(re.findall(r"^    (?:\*{0,2})(\w+)(?: \(.*?\))?: ", _section(doc, "Args"), re.MULTILINE))
    lacks = []
    if described != set(taken):
        lacks.append("Args")
    if taken and name not in HARMLESS and not _section(doc, "Raises"):
        lacks.append("Raises")
    examples = _section(doc, "Examples") + _section(inspect.getdoc(owner) or "", "Examples")
    word = "" if name in MADE else re.escape(name.rpartition(".")[2])
    if not re.search(rf"^ *(>>>|\.\.\.) .*\b{word}\b", examples, re.MULTILINE):
        lacks.append("Examples")
    return " ".join(lacks)


def _section(doc: str, title: str) -> str:
    match = re.search(rf"^{title}:\n((?:    .*\n|\n)*)", doc + "\n", re.MULTILINE)
    return match[1] if match else ""
