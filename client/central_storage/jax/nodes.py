"""Classes of pytrees, and functions that JAX has transformed, on their way to a replica.

A class of the user travels by value, so in a replica it is another class, which JAX has not seen: what JAX knows of it
travels, too. Nothing public tells how a class was registered, so this reads the table that JAX itself reads.
"""

from __future__ import annotations

import abc
import copyreg
import dataclasses
import inspect
from typing import Any

import jax
from jax import tree_util
from jax._src.tree_util import _registry as registered

from central_storage.pickling.code_analysis import is_importable, is_users
from central_storage.pickling.pickler import CLASS_PARTS

__all__ = ["register"]


def register(cls: type, way: str, arguments: tuple[Any, ...]) -> None:
    """Register a class that has arrived, unless its metaclass or its base has done so."""
    if not tree_util.default_registry.is_node(cls):
        getattr(tree_util, way)(cls, *arguments)


def _parts(cls: type) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """For the pickler: what a class that JAX knows needs beside its attributes."""
    if cls not in registered:
        return {}, []
    if type(cls) not in (type, abc.ABCMeta):  # the metaclass, such as that of equinox, registers what it makes
        return _fields(cls), []
    return _fields(cls), [(register, *_registration(cls))]


def _fields(cls: type) -> dict[str, Any]:
    """The class's own fields as its body has them, because a metaclass or a base registers the class with the fields
    that it finds there."""
    inherited = [getattr(base, "__dataclass_fields__", {}) for base in cls.__mro__[1:]]
    own = {
        name: dataclasses.field(default=None, metadata=dict(field.metadata))
        for name, field in cls.__dict__.get("__dataclass_fields__", {}).items()
        if not any(known.get(name) is field for known in inherited)
    }
    return {"__annotations__": dict.fromkeys(own, object), **own} if own and "__slots__" not in cls.__dict__ else {}


def _registration(cls: type) -> tuple[str, tuple[Any, ...]]:
    """The function of ``jax.tree_util`` that registered the class, and its arguments."""
    flatten, unflatten = registered[cls]
    known = inspect.getclosurevars(flatten).nonlocals if inspect.isfunction(flatten) else {}
    if {"data_fields", "meta_fields"} <= known.keys():
        names = (*known["data_fields"], *known["meta_fields"])
        every = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
        dropped = [field.name for field in every if field.init and field.name not in names]
        return "register_dataclass", (known["data_fields"], known["meta_fields"], dropped)
    if hasattr(cls, "tree_flatten_with_keys"):
        return "register_pytree_with_keys_class", ()
    if "flatten_with_keys" in known:
        return "register_pytree_with_keys", (known["flatten_with_keys"], unflatten)
    return "register_pytree_node", (flatten, unflatten)


def _transformed(function: Any) -> str | tuple[Any, ...]:
    """A function of a library by its name, so that it stays the same; one of the user by its parts."""
    name: str = getattr(function, "__qualname__", "")
    if name and is_importable(function) and not is_users(function.__module__):
        return name
    if isinstance(function, jax.custom_vjp):  # its __new__ has a parameter, so pickle could write it and not read it
        return object.__new__, (type(function),), function.__dict__
    parts: tuple[Any, ...] = function.__reduce_ex__(4)
    return parts


CLASS_PARTS.append(_parts)
for _kind in (jax.custom_jvp, jax.custom_vjp, type(jax.jit(_transformed))):
    copyreg.pickle(_kind, _transformed)
