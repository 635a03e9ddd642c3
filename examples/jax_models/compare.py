"""Trains a model with JAX alone and with Central Storage, and prints the largest difference of a parameter.

python examples/jax_models/compare.py mlp
python examples/jax_models/compare.py transformer --epochs 1
"""

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np


def main() -> None:
    name, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        trained = []
        for program in (f"{name}_jax.py", f"{name}.py"):
            print(program, flush=True)
            file = Path(folder, program)
            command = [sys.executable, str(Path(__file__).with_name(program)), "--checkpoint", str(file), *options]
            subprocess.run(command, check=True)
            trained.append(jax.tree.leaves(pickle.loads(file.read_bytes())[1]))
    difference = max(float(np.abs(one - other).max()) for one, other in zip(*trained, strict=True))
    print(f"largest difference from JAX alone: {difference:.1e}")


if __name__ == "__main__":
    main()
