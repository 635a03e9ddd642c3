"""The public side of objects: names, attributes and tracebacks.

``dir()`` and completion show public names only, an attribute that a class does not have is refused, and a traceback
shows the user's own frames. ``central_storage/__init__.py`` makes public names ready with :func:`present`. A class that
no public name leads to calls :func:`presented` itself, where it is defined.
"""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from central_storage.diagnostics.callers import OURS, is_ours
from central_storage.diagnostics.tensorflow_members import Missing, missing_of
from central_storage.diagnostics.tracebacks import shortened

__all__ = ["INTERNAL", "Closed", "hidden", "present", "presented"]

C = TypeVar("C", bound=type)

#: By class, members without an underscore that the package's own modules and the workers use, and that users do not.
INTERNAL = {
    "StrategyBase": """controller devices_by_replica call series carrier variable_sets extended_parameter_device claim
        settle_owners remember evaluate_schedules take_along logical_devices_here run_changing""",
    "CentralStorageStrategy": "from_backend handles object_for adopt is_running",
    "Counters": "wire_of to_wire check refuse is_checked",
    "DistributedDataset": "place go_to is_iterated_by is_elsewhere orders set_orders fault has_states next_position",
    "DistributedIterator": "take give_back lend end_lending is_over place is_at go_to fault orders data",
    "ReplicaContext": "backend is_local",
    "Variable": "from_record adopt is_ordinary number current forget_view rename",
    "Observer": "open",
    "TensorSpec": "admits",
    "Metric": "adopt",
    "GradientAccumulator": "adopt rename names_of_variables sums is_name start",
    "Optimizer": """from_record adopt slots slot_value slot_rows set_slot set_slot_rows evaluate_schedule number_of
        refuse_schedule checked_changes took counted counts_by_variable members rule""",
    # Methods of torch's tensors that write, which can do nothing in the script.
    "CentralParameter": """add_ addcdiv_ addcmul_ bernoulli_ clamp_ clamp_max_ clamp_min_ clip_ copy_ div_ divide_
        exponential_ fill_ index_add_ index_copy_ index_fill_ lerp_ log_normal_ masked_fill_ masked_scatter_ mul_
        multiply_ neg_ normal_ pow_ random_ relu_ renorm_ round_ scatter_ scatter_add_ sub_ subtract_ trunc_ uniform_
        zero_""",
    "CentralOptimizer": "groups_for_update push changes pushed numbers values counts forget_pushed",
    "ExponentialMovingAverage": "start adopt rename learn names_of_variables",
}
#: The same for every class: the name of a rule or schedule in the tables of the protocol, and its record.
INTERNAL_ANYWHERE = frozenset({"kind", "record"})
# The special methods that users call, by operators and statements.
_CALLED = frozenset(
    {"__init__", "__call__", "__iter__", "__next__", "__enter__", "__exit__", "__getitem__", "__setitem__", "__array__"}
    | {"__float__", "__int__", "__bool__", "__index__", "__reduce_ex__", "__deepcopy__", "__copy__"}
    | {"__len__", "__array_ufunc__", "__array_function__", "__dlpack__", "__matmul__"}
)


class Closed:
    """Base of every public class with attributes. A misspelt name is an error, not a value that nobody reads.

    Only this project adds public attributes to its objects. A user's class that derives from one of ours may add its
    own in its methods. Code elsewhere may add none to it whose name is near a public one, and no code may add one that
    differs only in case and underscores from an attribute that can be set. Only a function can replace a method.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, instead in missing_of(cls).items():
            type.__setattr__(cls, name, Missing(name, instead))

    def __setattr__(self, name: str, value: Any) -> None:
        cls = type(self)
        if not name.startswith("_"):
            found = getattr(cls, name, None)
            if found is None and not hasattr(cls, name) and not self._may_add(name, sys._getframe(1)):  # noqa: SLF001  (the caller)
                raise AttributeError(unknown(cls, name))
            if isinstance(found, FunctionType) and not callable(value) and _is_of_project(found):
                raise AttributeError(f"{cls.__name__}.{name} is a method, not a value that can be set; call it")
        object.__setattr__(self, name, value)

    def _may_add(self, name: str, caller: Any) -> bool:
        if name in getattr(self, "__dict__", ()) or is_ours(caller):
            return True
        cls = type(self)
        in_docstring = getattr(sys.modules[cls.__module__], cls.__name__, None) is not cls
        is_users = in_docstring or not _is_of_project(cls)
        if not is_users or any(_bare(name) == _bare(known) for known in settable(cls)):
            return False
        code = caller.f_code  # of a method if its first argument is this object
        is_method = code.co_argcount > 0 and caller.f_locals.get(code.co_varnames[0]) is self
        return is_method or not _near(cls, name, 0.85)


def settable(cls: type) -> list[str]:
    """The public properties of ``cls`` that can be set."""
    return [name for name in _public(cls, dir(cls)) if getattr(getattr(cls, name, None), "fset", None)]


def unknown(cls: type, name: str) -> str:
    """The text of the error about an attribute that objects of ``cls`` do not have."""
    known = settable(cls)
    near = _near(cls, name, 0.6)
    hint = f"; did you mean {near[0]}?" if near else ""
    can = f"; what can be set: {', '.join(known)}" if known else ""
    return f"{cls.__name__} has no attribute {name!r}{hint}{can}"


def _near(cls: type, name: str, likeness: float) -> list[str]:
    """The public name of ``cls`` that is most like ``name``, if one is as like as ``likeness`` (0 to 1)."""
    import difflib  # late: only mistakes need it

    known = settable(cls)
    public = sorted(_public(cls, dir(cls)), key=lambda each: each not in known)
    return difflib.get_close_matches(name, public, 1, likeness)


def _bare(name: str) -> str:
    return name.replace("_", "").lower()


def hidden(cls: type) -> frozenset[str]:
    """The members of ``cls`` that are not for users, though no underscore begins their names."""
    internal = (INTERNAL.get(base.__name__, "").split() for base in cls.__mro__)
    return INTERNAL_ANYWHERE.union(*internal, *map(missing_of, cls.__mro__))


def present(thing: Any) -> Any:
    """``thing``, a public module, class or function, ready for users; a function comes back as another object."""
    if isinstance(thing, ModuleType) and "__dir__" not in vars(thing):  # not yet: some modules have each other
        names: list[str] = thing.__all__
        vars(thing)["__dir__"] = lambda: sorted(names)
        for name in names:
            found = present(getattr(thing, name))
            if not isinstance(found, ModuleType):
                setattr(thing, name, found)
    elif isinstance(thing, type):
        presented(thing)
    elif isinstance(thing, FunctionType) and _is_of_project(thing) and not _is_worker():
        return _presented_function(thing)
    return thing


def _presented_function(function: FunctionType) -> FunctionType:
    home, name = vars(sys.modules[function.__module__]), function.__name__
    if home.get(name) is function and "__wrapped__" not in vars(function):
        home[name] = shortened(function)  # there a pickle finds it
    found: FunctionType = home.get(name, function)
    return found


def presented(cls: C) -> C:
    """``cls``, whose objects show users' names in ``dir()`` and whose methods show users' frames in tracebacks; its
    bases are presented, too. Exceptions and enums stay as they are."""
    if issubclass(cls, BaseException | enum.Enum):
        return cls
    for base in cls.__mro__:
        if _is_of_project(base) and "_cs_is_presented" not in vars(base) and not getattr(base, "_is_protocol", False):
            type.__setattr__(base, "_cs_is_presented", True)
            type.__setattr__(base, "__dir__", _public_names)
            internal = hidden(base)
            for name, member in list(vars(base).items()) if not _is_worker() else ():
                if name in _CALLED or not (name.startswith("_") or name in internal):
                    type.__setattr__(base, name, _shortened(member))
    return cls


def _is_of_project(thing: type | FunctionType) -> bool:
    return thing.__module__.partition(".")[0] in OURS


def _is_worker() -> bool:
    """Whether this process is a worker. It sends tracebacks as text, so wrappers would only slow its steps down."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name == "cs_worker.__main__"


def _shortened(member: Any) -> Any:
    if isinstance(member, classmethod | staticmethod):
        return type(member)(shortened(member.__func__))
    if isinstance(member, property):
        setter = None if member.fset is None else shortened(member.fset)
        return property(member.fget, setter, member.fdel, member.__doc__)
    return shortened(member) if inspect.isfunction(member) else member


def _public_names(self: Any) -> list[str]:
    """The names that ``dir()`` shows."""
    return _public(type(self), object.__dir__(self))


def _public(cls: type, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that are for users, in alphabetical order."""
    return sorted(name for name in {*names} - hidden(cls) if not name.startswith("_"))
