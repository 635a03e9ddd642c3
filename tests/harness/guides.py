"""The tables and the code of the guide's pages."""

from __future__ import annotations

import re
from pathlib import Path

from .processes import ROOT

__all__ = ["columns", "python_blocks", "table"]


def python_blocks(page: str) -> list[str]:
    """The Python code blocks of a page of the guide."""
    return re.findall(r"^```python\n(.*?)^```$", _text(page), re.DOTALL | re.MULTILINE)


def table(page: str, first_header: str) -> list[list[str]]:
    """The cells of the table whose first header is this, without its headers."""
    header = rf"^\| {re.escape(first_header)} \|.*\n\|[ |-]*\n"
    [after] = re.split(header, _text(page), flags=re.MULTILINE)[1:]
    rows = after.partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def columns(page: str, first_header: str) -> list[str]:
    """The program in each column of a table: the code of its cells, from top to bottom."""
    rows = table(page, first_header)
    return [
        "\n".join(code for cell in column for code in re.findall(r"`([^`]*)`", cell))
        for column in zip(*rows, strict=True)
    ]


def _text(page: str) -> str:
    return Path(ROOT / "docs/guide" / page).read_text()
