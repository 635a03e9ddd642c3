"""The files around the code agree with the code and with each other: CONTRIBUTING, hooks, workflows, Stability."""

from __future__ import annotations

import importlib
import re
import tomllib

import pytest
from tests.harness.processes import ROOT

import central_storage as cs
from central_storage.checkpoint import file_format
from cs_proto.messages import PROTOCOL

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
STABILITY = (ROOT / "docs" / "stability.md").read_text()
HOOKS = (ROOT / ".pre-commit-config.yaml").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PREFIX = "Programming Language :: Python :: "
PYTHONS = [line.removeprefix(PREFIX) for line in PROJECT["classifiers"] if line.startswith(PREFIX)]


def test_every_path_in_contributing_exists() -> None:
    named = set(re.findall(r"(?:\.github|benchmarks|client|docs|proto|server|tests|worker)/[\w./-]*\w", CONTRIBUTING))
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("message", "is_good"),
    [
        ("server: refuse a variable without a name\n", True),
        ("server, client: mend what breaks\n\nWhy.\n", True),
        ("server: " + "x" * 64 + "\n", True),
        ("server: " + "x" * 65 + "\n", False),
        ("Refuse a variable without a name\n", False),
        ("server: Refuse a variable\n", False),
        ("server: refuse a variable\nThe body follows at once.\n", False),
    ],
)
def test_the_hook_checks_the_commit_subject_that_contributing_asks_for(message: str, is_good: bool) -> None:
    assert "`area: imperative`, at most 72 characters" in CONTRIBUTING
    [pattern] = re.findall(r"entry: '(.*)'\n        args: \[--negate, --multiline\]", HOOKS)
    assert bool(re.search(pattern, message, re.MULTILINE | re.DOTALL)) == is_good


def test_hooks_run_what_lint_runs() -> None:
    [lint] = re.findall(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    tools = re.findall(r"\$\(BIN\)/([\w-]+(?: check| format)?)", lint)
    assert re.findall(r"entry: \.venv/bin/([\w-]+(?: check| format)?)", HOOKS) == tools


def test_workflows_call_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = set()
    for workflow in WORKFLOWS:
        text = workflow.read_text()
        called.update(re.findall(r"run: make ([a-z-]+)", text))
        called.update(name for names in re.findall(r"tier: \[(.*)\]", text) for name in names.split(", "))
    assert called >= {"setup", "dist", "test", "test-soak"}
    assert called <= targets


def test_pythons_are_the_same_everywhere() -> None:
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    for listed in re.findall(r"python: \[(.*)\]", workflow):
        assert listed.replace('"', "").split(", ") == PYTHONS
    assert f"- Python {', '.join(PYTHONS[:-1])} and {PYTHONS[-1]}." in STABILITY
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


def test_stability_states_the_numbers_of_the_code() -> None:
    assert f"This version speaks protocol {PROTOCOL}," in STABILITY
    written = file_format.FORMAT
    assert f"| format {written}: checksums" in STABILITY
    assert f"| format {written + 1}:" not in STABILITY


def test_stability_names_the_public_modules() -> None:
    modules = [name for name in cs.__all__ if getattr(cs, name).__class__.__name__ == "module"]
    listed = ", ".join(f"`{name}`" for name in modules[:-1]) + f" and `{modules[-1]}`"
    assert listed in STABILITY
    assert all(getattr(cs, name).__all__ for name in modules)


@pytest.mark.parametrize("command", PROJECT["scripts"])
def test_every_command_says_its_version(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, _, name = PROJECT["scripts"][command].partition(":")
    with pytest.raises(SystemExit, match=r"^0$"):
        getattr(importlib.import_module(module), name)(["--version"])
    assert capsys.readouterr().out == f"{command} {cs.__version__}\n"


def test_every_claim_of_the_security_page_names_a_test_that_exists() -> None:
    claims = re.findall(
        r"^\| .* \| `(tests/[\w/.]+)(?:::(\w+))?` \|$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE
    )
    assert len(claims) > 10
    for path, name in claims:
        assert not name or f"def {name}(" in (ROOT / path).read_text(), (path, name)


def test_no_checkpoint_lies_in_the_root() -> None:
    """Two did once: a relative path had gone into a commit, and so into the sdist."""
    assert [path.name for path in ROOT.iterdir() if path.name.endswith(".safetensors")] == []
