"""The tables and the code of the guide's pages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .processes import ROOT

__all__ = ["HYPERPARAMETERS", "columns", "python_blocks", "rules", "table", "updated"]


def python_blocks(page: str) -> list[str]:
    """The Python code blocks of a page of the guide."""
    return re.findall(r"^```python\n(.*?)^```$", _text(page), re.DOTALL | re.MULTILINE)


def table(page: str, headers: str) -> list[list[str]]:
    """The cells of the table whose headers begin so, without them."""
    header = rf"^\| {re.escape(headers)}.*\n\|[ |-]*\n"
    after = re.split(header, _text(page), flags=re.MULTILINE)[1]
    rows = after.partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def columns(page: str, headers: str) -> list[str]:
    """The program in each column of a table: the code of its cells, from top to bottom."""
    rows = table(page, headers)
    return [
        "\n".join(code for cell in column for code in re.findall(r"`([^`]*)`", cell))
        for column in zip(*rows, strict=True)
    ]


def rules(library: int) -> dict[str, str]:
    """The code of one update by the name of the rule, on the page about optimizers. ``library``: 0 is torch, 1 is optax
    and 2 is TensorFlow."""
    found: dict[str, str] = {}
    for name, *cells in table("optimizers.md", "rule"):
        pieces = re.findall(r"`([^`]*)`|as (Adam|torch)", cells[library])
        other = {"Adam": found.get("Adam", ""), "torch": "\n".join(re.findall(r"`([^`]*)`", cells[0]))}
        found[name] = "\n".join(code or other[named] for code, named in pieces)
    return found


#: What the rules of the page leave open: numbers at which their differences are seen.
HYPERPARAMETERS = {"mu": 0.9, "b1": 0.9, "b2": 0.98, "rho": 0.9, "eps": 0.05, "decay": 0.3}


def updated(
    code: str, gradients: Iterable[float], rates: Iterable[float], start: float = 1.0, **hyperparameters: float
) -> list[float]:
    """The weight after each update by this code."""
    names: dict[str, Any] = {"w": start, "m": 0.0, "v": 0.0, "s": 0.0, "a": 0.0, "sqrt": math.sqrt, **hyperparameters}
    found = []
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        names |= {"t": t, "g": gradient, "lr": rate}
        exec(code, names)
        found.append(names["w"])
    return found


def _text(page: str) -> str:
    return Path(ROOT / "docs/guide" / page).read_text()
