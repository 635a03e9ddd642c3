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


LAYER = "class Layer:\n  __slots__ = ('w', {})\n  def __init__(self, w): self.w = w\n"
CHANGED = {
    "list": ("used = [old]", "used[:] = [new]"),
    "list-of-lists": ("used = [1, [old], 2]", "used[:] = [1, [new], 2]"),
    "tuple": ("used = ([old], 1)", "used[0][:] = [new]"),
    "dict": ("used = dict(w=old)", "used.update(w=new)"),
    "keys": ("used = {old: 1}", "used.clear(); used[new] = 1"),
    "itself": ("used = [old]; used.append(used)", "used[0] = new"),
    "objects": (LAYER.format("'__weakref__'") + "used = [Layer(old)]", "used[:] = [Layer(new)]"),
    "slots": (LAYER.format("") + "used = Layer(old)", "used.w = new"),
}


@pytest.mark.parametrize(("made", "changed"), CHANGED.values(), ids=CHANGED)
@pytest.mark.parametrize("is_cell", [True, False])
def test_other_variables_under_the_id_of_the_old_ones_are_seen_also_if_those_live(
    names: dict[str, Any], made: str, changed: str, is_cell: bool
) -> None:
    """A new list often lies where the one that has just gone lay: it looks like the old one, with another content."""
    names["old"], names["new"] = cs.Variable(1.0), cs.Variable(2.0)
    cell(made, names)
    defined = "def step(): return used"
    cell(f"def outer(used):\n  {defined}\n  return step\nstep = outer(used)" if is_cell else defined, names)
    captures = Captures(names["step"])
    assert captures.hold()
    cell(changed, names)
    assert not captures.hold()
    assert Captures(names["step"]).hold()


def test_a_list_that_is_changed_holds_until_it_has_another_variable(names: dict[str, Any]) -> None:
    cell("w = cs.Variable(1.0)\nused = [w]\ndef step(): return used", names)
    captures = Captures(names["step"])
    cell("used.insert(0, 1.0)\nused.append(2.0)", names)
    assert captures.hold()
    cell("used.clear()", names)
    assert captures.hold()
    cell("other = cs.Variable(2.0)\nused.append(other)", names)
    assert not captures.hold()
