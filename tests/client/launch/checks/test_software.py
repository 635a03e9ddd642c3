"""Versions, containers and container engines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from central_storage.launch.checks import software
from cs_proto.version import __version__


def test_versions_are_told() -> None:
    [finding] = software.versions()
    assert finding.level == "good"
    assert finding.text.startswith(f"central-storage {__version__}, CPython 3.")
    assert ", numpy " in finding.text


def test_a_missing_library_is_bad() -> None:
    told, finding = software.versions(lambda name: "" if name in ("numba", "torch") else "1.0")
    assert "jax 1.0" in told.text
    assert (finding.level, finding.text) == ("bad", "numba not installed, although every service needs it")
    assert finding.remedy.endswith("-m pip install numba")


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        (".dockerenv", "", "inside one (docker)"),
        ("run/.containerenv", "", "inside one (podman)"),
        ("proc/1/cgroup", "0::/kubepods.slice/kubepods-pod1.slice\n", "inside one (Kubernetes)"),
        ("proc/1/cgroup", "0::/init.scope\n", "not inside one, as far as can be seen"),
        ("nothing", "", "not inside one, as far as can be seen"),
    ],
)
def test_a_container_is_noticed(tmp_path: Path, file: str, text: str, said: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    [finding] = software.container(tmp_path)
    assert (finding.level, finding.text) == ("good", said)


def engine(tmp_path: Path, name: str, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the only engine on the path."""
    path = tmp_path / name
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_no_engine_is_nothing_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    [finding] = software.engine()
    assert (finding.level, finding.text) == ("good", "none; only docker-compose.yml needs one")


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_an_engine_that_answers_is_told(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine(tmp_path, name, "echo 27.1.0", monkeypatch)
    [finding] = software.engine()
    assert finding.text == f"{name} 27.1.0 answers this user"


@pytest.mark.parametrize("program", ["echo permission denied >&2; exit 1", "echo; exit 0", "exec sleep 60"])
def test_an_engine_that_does_not_answer_has_a_remedy(
    tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.symlink("/bin/sleep", tmp_path / "sleep")
    monkeypatch.setattr(software, "_PATIENCE", 0.5)
    engine(tmp_path, "docker", program, monkeypatch)
    [finding] = software.engine()
    assert finding.text == "docker does not answer this user; only docker-compose.yml needs it"
    assert "usermod -aG docker" in finding.remedy
