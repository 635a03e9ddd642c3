"""Limits: descriptors and locked memory."""

from __future__ import annotations

import resource

import pytest

from central_storage.launch.checks import limits

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "level", "text"),
    [
        (1024, 1048576, "good", "1024 in a script, 1048576 in a service's processes"),
        (1024, UNLIMITED, "good", "1024 in a script, no limit in a service's processes"),
        (64, 1048576, "bad", "64 are allowed (the limit of a script), and a service needs 128 in each process"),
        (
            64,
            64,
            "bad",
            "64 are allowed (the hard limit, to which a service raises its own), and a service needs 128 in each "
            "process",
        ),
    ],
)
def test_few_descriptors_are_bad(soft: int, hard: int, level: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    [finding] = limits.descriptors()
    assert (finding.level, finding.text) == (level, text)
    assert ("ulimit -n 128" in finding.remedy) == (level == "bad")


def test_locked_memory_counts_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(limits.locked_memory(0)) == []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    [finding] = limits.locked_memory(1)
    assert (finding.level, finding.text[:20]) == ("good", "8 MiB (ulimit -l); w")
    assert "ulimit -l unlimited" in finding.remedy
    monkeypatch.setattr(resource, "getrlimit", lambda which: (UNLIMITED, UNLIMITED))
    [finding] = limits.locked_memory(1)
    assert finding.text == "no limit"
