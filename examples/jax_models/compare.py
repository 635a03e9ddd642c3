"""Train models with JAX alone and here, and print the largest difference of a parameter.

make compare-jax
python examples/jax_models/compare.py transformer --epochs 1    # one of them, with options of its programs
"""

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

# float32 has 24 bits. Sums in another order differ in the last one, and every step makes more of it.
LIMIT = 5e-3
ARGUMENTS = {"mlp": ["--epochs", "2"], "transformer": ["--epochs", "1"]}


def largest_difference(name: str, arguments: list[str]) -> float:
    """Of a parameter, after both programs have trained it."""
    with tempfile.TemporaryDirectory() as folder:
        trained = []
        for program in (f"{name}_jax.py", f"{name}.py"):
            print(program, flush=True)
            file = Path(folder, program)
            command = [sys.executable, str(Path(__file__).with_name(program)), "--checkpoint", str(file), *arguments]
            subprocess.run(command, check=True)
            trained.append(jax.tree.leaves(pickle.loads(file.read_bytes())[1]))
    return max(float(np.abs(one - other).max()) for one, other in zip(*trained, strict=True))


def main() -> int:
    name, *arguments = sys.argv[1:] or [""]
    largest = 0.0
    for each in [name] if name else ARGUMENTS:
        difference = largest_difference(each, arguments or ARGUMENTS[each])
        print(f"{each:<12} largest difference from JAX alone: {difference:.1e}", flush=True)
        largest = max(largest, difference)
    return int(largest > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
