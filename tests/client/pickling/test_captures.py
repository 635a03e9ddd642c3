"""When a frozen function is sent anew: one of the names that it reads has another object."""

from __future__ import annotations

import functools
import weakref
from types import ModuleType
from typing import Any

import pytest

import central_storage as cs
from central_storage.pickling.captures import Captures


def cell(source: str, names: dict[str, Any]) -> None:
    """Run a notebook's cell."""
    exec(source, names)


@pytest.fixture
def names() -> dict[str, Any]:
    return {"__name__": __name__, "cs": cs, "functools": functools}


REPLACEABLE = [
    "used = cs.Variable(1.0)",
    "used = [cs.Variable(1.0)]",
    "used = cs.optimizers.SGD()",
    "def used(): return 1",
    "@functools.cache\ndef used(): return 1",
    "@cs.function\ndef used(): return 1",
    "class used: pass",
]


@pytest.mark.parametrize("source", REPLACEABLE)
def test_an_object_that_is_made_anew_is_seen(names: dict[str, Any], source: str) -> None:
    cell(source, names)
    cell("def step(): return used, len", names)
    captures = Captures(names["step"])
    assert captures.hold()
    cell(source, names)
    assert not captures.hold()
    assert Captures(names["step"]).hold()


@pytest.mark.parametrize("source", REPLACEABLE)
def test_a_name_that_no_longer_has_it_is_seen(names: dict[str, Any], source: str) -> None:
    for end in ("used = None", "del used"):
        cell(source, names)
        cell("def step(): return used", names)
        captures = Captures(names["step"])
        cell(end, names)
        assert not captures.hold()


@pytest.mark.parametrize("source", REPLACEABLE)
def test_a_name_of_a_module_of_the_user_is_seen(names: dict[str, Any], source: str) -> None:
    names["package"], module = ModuleType("package_of_a_user"), ModuleType("package_of_a_user.module")
    names["package"].module = module
    vars(module).update(names)
    cell(source, vars(module))
    cell("def inner(): return used", vars(module))
    cell("def direct(): return package.module.used\ndef by_function(): return package.module.inner()", names)
    captured = [Captures(names["direct"]), Captures(names["by_function"])]
    assert all(each.hold() for each in captured)
    cell(source, vars(module))  # as importlib.reload does
    assert not any(each.hold() for each in captured)


def test_names_of_libraries_are_not_followed(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cell("import json\ndef step(): return json.dumps", names)
    captures = Captures(names["step"])
    monkeypatch.setattr("json.dumps", repr)
    assert captures.hold()


def test_a_name_that_is_bound_only_later_is_seen(names: dict[str, Any]) -> None:
    cell("def step(): return helper() + later", names)
    captures = Captures(names["step"])
    assert captures.hold()
    cell("later = 1", names)
    assert not captures.hold()


def test_what_a_compiled_function_reads_is_searched_too(names: dict[str, Any]) -> None:
    cell("w = cs.Variable(1.0)\n@functools.cache\ndef loss(): return w\ndef step(): return loss()", names)
    captures = Captures(names["step"])
    cell("w = cs.Variable(1.0)", names)
    assert not captures.hold()


def test_numbers_and_builtins_are_not_followed(names: dict[str, Any]) -> None:
    cell("n = 1\ndef step(): return n, len", names)
    captures = Captures(names["step"])
    cell("n = 2", names)
    assert captures.hold()


def test_a_proxy_of_an_object_that_is_gone_is_passed_over(names: dict[str, Any]) -> None:
    model = cs.Variable(1.0)
    names["holder"] = [weakref.proxy(model)]
    del model
    cell("def step(): return holder", names)
    assert Captures(names["step"]).hold()
