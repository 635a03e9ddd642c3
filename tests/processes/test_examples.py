"""Examples that the documents show."""

from __future__ import annotations

from tests.harness.processes import run


def test_the_twenty_lines_train() -> None:
    lines = run("examples/twenty_lines.py").ok().lines
    assert len(lines) == 11
    assert lines[-1] == "w is [1. 2. 3. 4. 5. 6. 7. 8.]"


def test_the_embedding_is_learned() -> None:
    sizes = ("--users", "300", "--items", "100", "--rank", "2", "--ratings", "10000", "--batch", "400", "--epochs", "4")
    ended = run("cs-launch", "--devices", "cpu:0,cpu:1", "examples/embedding.py", *sizes).ok()
    *epochs, memory, unseen = [line for line in ended.lines if line.startswith(("epoch", "memory", "ratings"))]
    assert len(epochs) == 4
    assert "0.0 MB for tables" in memory
    assert float(unseen.rpartition(" ")[2]) < 0.2
