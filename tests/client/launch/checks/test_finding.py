"""Findings without secrets."""

from __future__ import annotations

import pwd
import socket
from types import SimpleNamespace

import pytest

from central_storage.launch.checks.finding import hider


@pytest.fixture(autouse=True)
def somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/data/people/telling")
    monkeypatch.setenv("USER", "telling")
    monkeypatch.setenv("LOGNAME", "otherwise")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir="/home/telling", pw_name="telling"))
    monkeypatch.setattr(socket, "gethostname", lambda: "gazelle.lab.example")


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("/data/people/telling/.cache", "~/.cache"),
        ("in /home/telling.", "in ~."),
        ("/home/telling2/x and /tmp/telling/x", "/home/telling2/x and /tmp/<user>/x"),
        ("OSError: telling@gazelle.lab.example, otherwise", "OSError: <user>@<host>, <user>"),
        ("gazelle: gazelles", "<host>: gazelles"),
        ("Linux 6.1.0-13-amd64 in /tmp/cs-1f3a22bb", "Linux 6.1.0-13-amd64 in /tmp/cs-1f3a22bb"),
    ],
)
def test_home_user_and_host_are_taken_out(text: str, hidden: str) -> None:
    assert hider()(text) == hidden


def test_a_name_that_many_have_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/data/admin")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir="/data/admin", pw_name="root"))
    assert hider()("/data/admin/.cache of root") == "~/.cache of root"


def test_a_user_without_a_name_has_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert hider()("/data/people/telling/a") == "~/a"
