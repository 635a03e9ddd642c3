"""All checks together, and ``cs-launch --doctor``, which prints them."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest

from central_storage.launch import checks, cli
from central_storage.launch.checks.finding import Finding, bad, good


def test_every_check_finds_something_and_what_is_not_good_has_a_remedy() -> None:
    for check in checks.CHECKS:
        assert all(finding.level == "good" or finding.remedy for finding in check())
    subjects = {finding.subject for finding in checks.findings()}
    assert {"kernel", "memory", "/dev/shm", "descriptors", "processors", "NUMA", "threads", "huge pages"} <= subjects
    assert {"GPUs", "container engine", "versions", "run directories", "kernel cache", "swap"} <= subjects


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file", "/proc/meminfo"), ValueError("not a number")])
def test_what_cannot_be_checked_is_bad_and_the_others_are_checked(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mapping_limits() -> Iterator[Finding]:
        yield good("swap", "none")
        raise error

    monkeypatch.setattr(checks, "CHECKS", (mapping_limits, mapping_limits))
    found = list(checks.findings())
    assert [finding.level for finding in found] == ["good", "bad", "good", "bad"]
    assert (found[1].subject, found[1].text) == ("mapping limits", f"cannot be checked ({error})")
    assert found[1].remedy


def test_cs_launch_prints_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def machine() -> Iterator[Finding]:
        yield good("swap", "none")
        yield bad("descriptors", "8 are allowed", "ulimit -n 128")

    monkeypatch.setattr(checks, "CHECKS", (machine,))
    assert cli.main(["--doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "good    swap: none",
        "bad     descriptors: 8 are allowed",
        "        remedy: ulimit -n 128",
        "bad: 1, slower: 0, good: 1",
    ]


def test_cs_launch_says_what_is_slower_on_arm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert cli.main(["--doctor"]) == 0
    slower = [line for line in capsys.readouterr().out.splitlines() if line.startswith("slower ")]
    assert sum("aarch64" in line for line in slower) == 2
