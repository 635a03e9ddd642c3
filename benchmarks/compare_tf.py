"""Run both programs of every pair in examples/from_tensorflow, and print how far losses and variables lie apart.

    make compare-tf

TensorFlow runs in a virtual environment of its own, which is made once.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import environments
import numpy as np

PROGRAMS = Path(__file__).resolve().parent.parent / "examples" / "from_tensorflow"
PAIRS = ("spirals", "ratings")
# float32 has 24 bits. Sums in another order differ in the last one, and many steps make more of it.
LIMIT = 1e-3


def results(python: str, program: str) -> dict[str, np.ndarray]:
    """What a program saved: the losses of all steps, and the variables at the end."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "results.npz"
        quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        subprocess.run([python, PROGRAMS / program, "--save", file], check=True, stdout=subprocess.DEVNULL, env=quiet)
        with np.load(file) as saved:
            return dict(saved)


def main() -> int:
    environments.make("tensorflow")
    tensorflow = environments.python_of("tensorflow")
    largest = 0.0
    print(f"{'program':<10} {'value':<8} {'shape':<12} {'largest difference':>20} {'beside values up to':>20}")
    for name in PAIRS:
        theirs, ours = results(tensorflow, f"{name}_tensorflow.py"), results(sys.executable, f"{name}.py")
        for key, expected in theirs.items():
            difference = float(np.abs(ours[key] - expected).max())
            size = float(np.abs(expected).max())
            largest = max(largest, difference / size)
            print(f"{name:<10} {key:<8} {expected.shape!s:<12} {difference:>20.2e} {size:>20.3f}")
    print(f"the largest difference, as a share of the largest value beside it: {largest:.1e}")
    return 0 if largest < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
