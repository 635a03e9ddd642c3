"""The reasons why a run is not captured are told to users."""

from __future__ import annotations

from pathlib import Path

from cs_server.engine.store.reasons import WORDS

PAGE = Path(__file__).parents[4] / "docs" / "performance.md"


def test_every_reason_is_explained() -> None:
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert [row for row in rows if row in WORDS] == list(WORDS)
