"""The table of promises in docs/reliability.md is whole, and what it names exists."""

from __future__ import annotations

import re

import pytest
from tests.harness.processes import ROOT
from tests.mutants.run import listed
from tests.soak.promises import PROMISES
from tests.soak.sabotage import sitecustomize

PAGE = (ROOT / "docs" / "reliability.md").read_text()
ROWS = [line for line in PAGE.partition("### Every promise")[2].partition("\n## ")[0].splitlines() if "| P" in line]
SABOTAGES = {
    *sitecustomize.SABOTAGES,
    *sitecustomize.OF_SCRIPTS,
    *sitecustomize.OF_WORKERS,
    *sitecustomize.OF_GATEWAYS,
}
#: What the programs of the soak look for themselves.
OF_THE_SOAK = {"naive-retry", "unguarded-read"}


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("| ").split(" | ")]


def test_every_promise_has_one_row() -> None:
    assert [cells(row)[0].partition(" ")[0] for row in ROWS] == [f"P{number}" for number in range(1, 45)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: cells(row)[0].partition(" ")[0])
def test_a_row_names_what_exists(row: str) -> None:
    promise, tried, violated, _, broken, command = cells(row)
    assert all((promise, tried, violated, broken, command))
    words = re.findall(r"`([^`]+)`", command)
    assert words or tried.startswith("not promised")
    for word in words:
        if word.startswith("python -m tests.soak.run --promise "):
            assert word.rpartition(" ")[2] in PROMISES
        elif word.startswith("make "):
            assert re.search(rf"^{word[5:]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), word
        else:
            assert (ROOT / word).is_file(), word
    known = {mutation.name for mutation in listed()} | SABOTAGES | OF_THE_SOAK
    for word in re.findall(r"`([^`]+)`", broken):
        assert word in known or any(name.startswith(word.rstrip("…")) for name in known if word.endswith("…")), word
