"""Examples that the documents show, and the Python code of README.md, docs/tutorial.md, docs/guide and the page about
failures."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tests.harness.processes import ROOT, run


def code(page: Path) -> list[str]:
    """The Python code blocks of a Markdown page."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


#: The pages whose code continues the quick start: not those about torch, JAX and Ray, which tests/interop and tests/ray
#: run.
PAGES = [
    str(page.relative_to(ROOT / "docs"))
    for page in [*sorted(ROOT.glob("docs/guide/*.md")), ROOT / "docs/troubleshooting.md"]
    if code(page) and not re.search(r"\b(torch|cst|csj|ray)\b", "".join(code(page)))
]


def test_the_twenty_lines_train() -> None:
    lines = run("examples/twenty_lines.py").ok().lines
    assert len(lines) == 11
    assert lines[-1] == "w is [1. 2. 3. 4. 5. 6. 7. 8.]"
    [output] = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert output.splitlines() == [lines[0], "...", lines[-1]]


@pytest.mark.slow
def test_the_tutorial_trains(tmp_path: Path) -> None:
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join(code(ROOT / "docs/tutorial.md")))
    _, correct, *_ = run(script, directory=tmp_path).ok().lines
    assert float(correct.removeprefix("correct ").removesuffix("%")) > 85  # as the page says


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    [quick_start] = code(ROOT / "README.md")
    setup, loop, _ = quick_start.partition("for epoch")  # a page continues after the line that makes `batches`
    assert loop
    script = tmp_path / "page.py"
    script.write_text("\n".join([setup, *code(ROOT / "docs" / page)]))
    ended = run(script, directory=tmp_path, environment={"PYTHONBREAKPOINT": "0"}).ok()
    said = iter(ended.lines)
    for shown in re.findall(r"^ *print\(.*\)  # (-?[\d.]+|\[.*\])(?=:|$)", script.read_text(), re.MULTILINE):
        assert shown in said, f"{shown} is not printed in its turn\n{ended}"


@pytest.mark.slow
def test_dropout_trains_and_makes_the_same_bits_again() -> None:
    lines = run("examples/dropout.py").ok().lines
    assert len(lines) == 10
    assert float(lines[-1].split()[-1].rstrip("%")) > 90
    assert run("examples/dropout.py").ok().lines == lines


@pytest.mark.slow
def test_the_embedding_is_learned() -> None:
    sizes = ("--users", "300", "--items", "100", "--rank", "2", "--ratings", "10000", "--batch", "400", "--epochs", "4")
    ended = run("cs-launch", "--devices", "cpu:0,cpu:1", "examples/embedding.py", *sizes).ok()
    *epochs, memory, unseen = [line for line in ended.lines if line.startswith(("epoch", "memory", "ratings"))]
    assert len(epochs) == 4
    assert "0.0 MB for tables" in memory
    assert float(unseen.rpartition(" ")[2]) < 0.2


@pytest.mark.parametrize(
    ("program", "largest"),
    [
        pytest.param("spirals", 0.1, id="training loop"),
        pytest.param("ratings", 2.0, id="recommender", marks=pytest.mark.slow),
    ],
)
def test_a_port_from_tensorflow_learns(program: str, largest: float, tmp_path: Path) -> None:
    folder = ROOT / "examples/from_tensorflow"
    ended = run(folder / f"{program}.py", "--save", tmp_path / "saved.npz").ok()
    assert float(ended.lines[-1].split()[3]) < largest
    with np.load(tmp_path / "saved.npz") as saved:
        assert saved["losses"][-1] < saved["losses"][0] / 4
