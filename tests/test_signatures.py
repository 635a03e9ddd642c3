"""Public signatures against those of TensorFlow's class, as recorded from five of its versions.

A name has the parameters of the newest version that has it: names, order and defaults. What is ours comes after them,
keyword-only. Older keyword names are accepted too, and warn.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import central_storage as cs

RECORDED = json.loads((Path(__file__).parent / "data" / "signatures.json").read_text())

#: Class.member of TensorFlow that is left out -> why.
LEFT_OUT = {
    "CentralStorageStrategy.colocate_vars_with": "an undocumented leftover; extended.colocate_vars_with is there",
    "CentralStorageStrategy.configure": "an undocumented leftover of sessions and clusters",
    "CentralStorageStrategy.experimental_run": "an undocumented leftover of graph mode; run is there",
    "CentralStorageStrategy.group": "an undocumented leftover of graph mode, where operations are grouped",
    "CentralStorageStrategy.make_dataset_iterator": "an undocumented leftover of graph mode",
    "CentralStorageStrategy.make_input_fn_iterator": "an undocumented leftover of graph mode",
    "CentralStorageStrategy.unwrap": "an undocumented leftover; experimental_local_results is there",
    "CentralStorageStrategy.update_config_proto": "an undocumented leftover of sessions",
    "StrategyExtended.experimental_run_steps_on_iterator": "graph mode; strategy.run_steps is there",
}

#: Constructors that users do not call.
NOT_CALLED = {"ReplicaContext.__init__", "StrategyExtended.__init__"}


def newest() -> Iterator[tuple[str, str, str]]:
    """(class, member, signature) of the newest version that has the member."""
    age = {version: place for place, version in enumerate(RECORDED["versions"])}
    for name, members in RECORDED["signatures"].items():
        for member, forms in members.items():
            last = max(forms, key=lambda form: max(age[version] for version in forms[form]))
            yield name, member, last


KEPT = [each for each in newest() if f"{each[0]}.{each[1]}" not in {*LEFT_OUT, *NOT_CALLED}]


def parameters(signature: inspect.Signature) -> list[tuple[str, str]]:
    """(name, default as text) of everything but self and what is keyword-only."""
    return [
        (parameter.name, "" if parameter.default is inspect.Parameter.empty else repr(parameter.default))
        for parameter in signature.parameters.values()
        if parameter.name not in ("self", "cls") and parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]


def recorded_parameters(text: str) -> list[tuple[str, str]]:
    """The same of a recorded signature, which is text."""
    parts = [part.strip() for part in text.strip("()").split(", ")]
    # The text of an enum's default has no comma, nor has any other default.
    pairs = [part.partition("=")[::2] for part in parts if part not in ("self", "cls", "/", "")]
    return [(name, default.removesuffix(", /")) for name, default in pairs]


@pytest.mark.parametrize(("name", "member", "text"), KEPT, ids=[f"{name}.{member}" for name, member, _ in KEPT])
def test_the_signature(name: str, member: str, text: str) -> None:
    cls = getattr(cs, name)
    found = inspect.getattr_static(cls, member, None)
    if text == "property":
        is_field = member in getattr(cls, "__dataclass_fields__", {})
        assert isinstance(found, property) or is_field, f"{name}.{member} is no property"
        return
    assert found is not None, f"{name} has no {member}"
    is_constructor = member in ("__init__", "__new__")
    signature = inspect.signature(cls if is_constructor else getattr(cls, member))
    assert parameters(signature) == recorded_parameters(text)
    keywords = [p for p in signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert all(keyword.default is not inspect.Parameter.empty for keyword in keywords), "what is ours may be left out"


def test_what_is_left_out_is_counted_and_does_not_exist() -> None:
    every = {f"{name}.{member}" for name, member, _ in newest()}
    assert set(LEFT_OUT) <= every
    assert len(LEFT_OUT) == 9
    assert len(KEPT) == len(every) - len(LEFT_OUT) - len(NOT_CALLED)
    for path in LEFT_OUT:
        name, _, member = path.partition(".")
        assert not hasattr(getattr(cs, name), member), f"{path} exists; take it from LEFT_OUT"


@pytest.mark.parametrize("path", LEFT_OUT)
def test_what_is_left_out_is_refused_with_a_remedy(path: str) -> None:
    name, _, member = path.partition(".")
    strategy = cs.get_strategy()
    with pytest.raises(AttributeError, match=rf"'{member}'; use instead: .+ \(docs/from-tensorflow.md\)"):
        getattr(strategy.extended if name == "StrategyExtended" else strategy, member)


def test_a_property_that_fails_keeps_its_own_error() -> None:
    class Strategy(type(cs.get_strategy())):  # type: ignore[misc]
        @property
        def broken(self) -> int:
            raise AttributeError("its own")

    with pytest.raises(AttributeError, match="its own"):
        _ = Strategy().broken
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        _ = cs.get_strategy().runn


def test_the_default_strategy_has_the_same_api() -> None:
    default = type(cs.get_strategy())
    for name, member, text in KEPT:
        if name == "CentralStorageStrategy" and member != "__init__":
            ours, other = getattr(cs.CentralStorageStrategy, member), getattr(default, member)
            assert text == "property" or inspect.signature(ours) == inspect.signature(other)
