"""The reference shows every public name, and says of every callable what it takes, what it raises, how it is used."""

from __future__ import annotations

import inspect

import pytest
from docs.site import reference

import central_storage
from central_storage.core.public_objects import INTERNAL


def test_the_reference_has_a_page_for_every_public_name() -> None:
    assert set(reference.pages()) == {*central_storage.__all__, *reference.FRAMEWORKS}


@pytest.mark.parametrize(
    "name", [name for name in reference.pages() if inspect.ismodule(getattr(central_storage, name))]
)
def test_the_page_of_a_module_shows_all_its_public_names(name: str) -> None:
    module = getattr(central_storage, name)
    shown = {each.split(".")[1] for each, _ in reference.pages()[name]}
    assert shown == set(() if name in reference.ALIASES else module.__all__)


def test_every_callable_says_what_it_takes_and_raises_and_shows_an_example() -> None:
    assert not reference.missing()


def test_what_the_tables_of_the_reference_name_exists() -> None:
    shown = {name: value for names in reference.pages().values() for name, value in names}
    for name, members in INTERNAL.items():
        bases = [
            base for cls in shown.values() if inspect.isclass(cls) for base in cls.__mro__ if base.__name__ == name
        ]
        if not bases and len(reference.FRAMEWORKS) < 2:
            continue  # a class of a package whose framework is not installed
        for member in members.split():
            assert any(hasattr(base, member) for base in bases), (name, member)
    assert shown.keys() >= {name for name in reference.MADE if _is_here(name)}
    methods = {f"{name}.{member}" for name, value in shown.items() for member in reference.members(name, value) or ()}
    assert shown.keys() | methods >= {name for name in reference.HARMLESS if _is_here(name)}


def _is_here(name: str) -> bool:
    """Whether it is not a name of a package whose framework is not installed."""
    framework = name.partition(".")[0]
    return framework not in ("jax", "torch") or framework in reference.FRAMEWORKS
