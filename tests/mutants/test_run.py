"""The list of mutations fits the tree, and the command judges them: noticed, survived, or not to be judged."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.harness.processes import ROOT
from tests.mutants import run
from tests.mutants.run import Mutation, Verdict

MUTATIONS = run.listed()
#: As little of pytest as the command needs: the first failure, and the exit code.
RUNS_TESTS = """
import sys
for path in sys.argv[1:]:
    tests = {}
    exec(open(path).read(), tests)
    for name in [name for name in tests if name.startswith("test_")]:
        try:
            tests[name]()
        except AssertionError:
            sys.exit(print(f"FAILED {path}::{name} - no") or 1)
"""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_fits_the_tree(mutation: Mutation) -> None:
    text = (ROOT / mutation.path).read_text()
    changed = mutation.applied(text)
    assert changed != text
    ast.parse(changed)
    for test in mutation.tests:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text() or not name, test


def test_names_are_unique_and_promises_have_numbers() -> None:
    assert [name for name, count in Counter(mutation.name for mutation in MUTATIONS).items() if count > 1] == []
    assert [
        mutation for mutation in MUTATIONS if not re.fullmatch(r"P([1-9]|[1-3][0-9]|4[0-3])", mutation.promise)
    ] == []
    assert len(MUTATIONS) >= 100


def test_text_that_is_not_there_once_is_an_error() -> None:
    mutation = Mutation("m", "P1", "proto/x.py", "a = 1", "a = 2", ())
    assert mutation.applied("a = 1\nb = 1\n") == "a = 2\nb = 1\n"
    for text in ("b = 1", "a = 1\na = 1\n"):
        with pytest.raises(ValueError, match=r"'a = 1' [02] times, not once"):
            mutation.applied(text)


def test_only_some_are_chosen() -> None:
    one = MUTATIONS[0]
    assert run.chosen(MUTATIONS, [one.name]) == [one]
    assert set(run.chosen(MUTATIONS, [one.promise])) == {each for each in MUTATIONS if each.promise == one.promise}
    assert run.chosen(MUTATIONS, []) == MUTATIONS
    with pytest.raises(ValueError, match=r"no mutation .* 'P99'"):
        run.chosen(MUTATIONS, ["P99"])


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Mutation]]:
    """A tree of one module and its test, and the mutations of its list."""
    for name in ("tree", "run", "tmp"):
        (tmp_path / name).mkdir()
    tree = tmp_path / "tree"
    (tree / "adds.py").write_text("def add(a, b):\n    return a + b\n")
    (tree / "test_adds.py").write_text("import adds\n\n\ndef test_adds():\n    assert adds.add(0, 2) == 2\n")
    (tree / "test_wrong.py").write_text("import adds\n\n\ndef test_wrong():\n    assert adds.add(1, 1) == 3\n")
    (tree / "pyproject.toml").write_text("")
    monkeypatch.setattr(run, "ROOT", tree)
    monkeypatch.setattr(run, "STATE", tmp_path / "build" / "mutants.json")
    (tmp_path / "runs_tests.py").write_text(RUNS_TESTS)
    monkeypatch.setattr(run, "_PYTEST", (sys.executable, "-S", str(tmp_path / "runs_tests.py")))

    class Tree:
        def __enter__(self) -> Path:
            return tree

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(run, "tree", Tree)
    noticed = Mutation("minus", "P1", "adds.py", "a + b", "b * 0", ("test_adds.py",))
    mutations = [
        noticed,
        replace(noticed, name="swapped", new="b + a"),
        replace(noticed, name="useless", tests=("test_wrong.py",)),
    ]
    monkeypatch.setattr(run, "listed", lambda: mutations)
    yield mutations
    assert (tree / "adds.py").read_text() == "def add(a, b):\n    return a + b\n"


def test_the_command_judges_and_remembers(
    small: list[Mutation], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--only", "minus", "--jobs", "1"]) == 0
    assert "1 mutations: 1 noticed" in capsys.readouterr().out
    assert run.main(["--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert "noticed  minus" not in out  # that is known
    assert "SURVIVED: swapped (adds.py)" in out
    assert re.search(r"BROKEN: useless \(adds.py\) without the mutation: test_wrong.py::test_wrong", out)
    verdicts = run.load()
    assert {name: verdict.outcome for name, verdict in verdicts.items()} == {
        "minus": "noticed",
        "swapped": "survived",
        "useless": "broken",
    }
    assert verdicts["minus"].by == "test_adds.py::test_adds"
    monkeypatch.setattr(run, "judge", lambda mutation, copy: pytest.fail("it is known"))
    assert run.main(["--jobs", "1"]) == 1


def test_a_survivor_with_a_reason_is_right_and_one_that_is_noticed_is_not(small: list[Mutation]) -> None:
    explained = replace(small[1], survives="addition commutes")
    verdict = Verdict(explained.digest(), "survived", "")
    text, is_right = run.report([explained], {"swapped": verdict})
    assert is_right
    assert "survived, as expected: swapped: addition commutes" in text
    text, is_right = run.report([explained], {"swapped": replace(verdict, outcome="noticed", by="test_adds")})
    assert not is_right
    assert "NOTICED: swapped" in text
