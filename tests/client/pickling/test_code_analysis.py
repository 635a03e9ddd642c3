"""Which modules are the user's own, and what code reads."""

import sys
import types
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest

from central_storage.pickling.code_analysis import is_importable, is_users, reads_of, submodules


@pytest.mark.parametrize(
    "name",
    [
        "builtins",
        "sys",
        "os",
        "os.path",
        "collections.abc",
        "importlib._bootstrap",
        "numpy",
        "numpy._core._multiarray_umath",
        "pytest",
        "central_storage.pickling.code_analysis",
        "cs_proto.errors",
    ],
)
def test_modules_that_a_worker_has(name: str) -> None:
    assert name in sys.modules
    assert not is_users(name)


@pytest.mark.parametrize("name", ["__main__", "__mp_main__", __name__])
def test_modules_of_the_user(name: str) -> None:
    assert is_users(name)


@pytest.mark.parametrize(
    ("file", "users"),
    [
        ("project/model.py", True),
        ("venv/lib/python3.12/site-packages/model.py", False),
        ("usr/lib/python3/dist-packages/model.py", False),
        ("project/model.cpython-311-x86_64-linux-gnu.so", False),
    ],
)
def test_where_a_module_lies_decides(
    file: str, users: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    name = f"model_{abs(hash(request.node.name))}"  # a verdict is kept by name
    module = types.ModuleType(name)
    module.__file__ = str(tmp_path / file)
    monkeypatch.setitem(sys.modules, name, module)
    assert is_users(name) is users


def test_a_namespace_package_lies_where_its_path_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = types.ModuleType("namespace_of_a_user")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    assert is_users(package.__name__)


def test_a_module_without_a_file_follows_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, users in (("made_by_the_user", True), ("numpy.made_by_numpy", False), (f"{__name__}.made", True)):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        assert is_users(name) is users


def test_what_cannot_be_imported_again_is_the_users_unless_a_library_made_it() -> None:
    assert is_users("no_such_module")
    assert not is_users("numpy.no_such_module")


class Outer:
    class Inner:
        def method(self) -> None: ...


def test_importable_is_what_its_name_leads_to() -> None:
    assert is_importable(Outer.Inner.method)
    assert is_importable(np.linalg.norm)
    assert not is_importable(lambda: None)
    assert not is_importable(type("Outer", (), {"__module__": __name__}))
    assert not is_importable(type("Gone", (), {"__module__": "no_such_module"}))


def test_global_names_in_the_order_of_the_code() -> None:
    def function(x):
        return second(x), third, lambda: fourth  # noqa: F821

    assert reads_of(function.__code__).global_names == ("second", "third", "fourth")


def test_a_class_body_reads_globals() -> None:
    def function():
        class Local:
            y = name_in_class_body  # noqa: F821

        return Local

    assert "name_in_class_body" in reads_of(function.__code__).global_names


def test_chains_and_escapes() -> None:
    def function(x):
        pkg.model.forward(x)  # noqa: F821
        settings.rate = 3  # noqa: F821
        inner = lambda: shared.table[0]  # noqa: E731, F821
        return inner(whole), both.part, both  # noqa: F821

    reads = reads_of(function.__code__)
    assert reads.chains["pkg"] == {("model", "forward")}
    assert reads.chains["settings"] == {("rate",)}
    assert reads.chains["shared"] == {("table",)}
    assert reads.chains["both"] == {("part",)}
    assert {"whole", "both"} <= reads.escaping
    assert not {"pkg", "settings", "shared"} & reads.escaping
    assert {"model", "forward", "rate", "table", "part"} <= reads.names


def test_chains_of_captured_variables() -> None:
    module = types.ModuleType("captured")

    def function():
        return lambda: module.weights.sum()

    assert reads_of(function.__code__).chains["module"] == {("weights", "sum")}


def test_many_names_do_not_hide_an_attribute() -> None:
    source = "def function():\n" + "".join(f" a{n}\n" for n in range(300)) + " return last.attribute"
    scope: dict[str, types.FunctionType] = {}
    exec(source, scope)
    assert reads_of(scope["function"].__code__).chains == {"last": {("attribute",)}}


def test_code_is_read_once() -> None:
    code = (lambda: x).__code__  # noqa: F821
    assert reads_of(code) is reads_of(code)


def test_submodules_that_code_can_address() -> None:
    assert list(submodules(xml, frozenset({"etree", "ElementTree", "other"}))) == ["xml.etree", "xml.etree.ElementTree"]
    assert list(submodules(xml, frozenset({"ElementTree"}))) == []
