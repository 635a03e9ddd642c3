"""The demonstration with its digits read from their file: to import scikit-learn takes longer than to train."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

from .processes import ROOT

__all__ = ["DIGITS", "quick_digits"]

DIGITS = "examples/digits.py"
_IMPORT = "from sklearn.datasets import load_digits\n"
_READ = """
def load_digits(*, return_X_y):
    rows = np.loadtxt({!r}, delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(int)

"""


def quick_digits(directory: Path) -> Path:
    """``examples/digits.py`` in ``directory``; it computes the same."""
    text = (ROOT / DIGITS).read_text()
    assert _IMPORT in text
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    script = directory / "digits.py"
    script.write_text(text.replace(_IMPORT, _READ.format(str(file))))
    return script
