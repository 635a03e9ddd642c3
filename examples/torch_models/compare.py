"""Train models with torch alone and here, and print the largest difference of all that they have saved.

    make compare-torch
    python examples/torch_models/compare.py gpt --steps 20     # one of them, with options of its programs

Compared are the parameters and buffers, the state of the optimizers and that of the schedule. The ConvNet here has no
dropout: torch alone draws the mask of a whole batch at once, and each replica that of its share, so the masks differ.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
# float32 has 24 bits. Sums in another order differ in the last one, and every step makes more of it.
LIMIT = 1e-3
ARGUMENTS = {
    "convnet": ["--epochs", "1", "--dropout", "0"],
    "gpt": ["--steps", "10"],
    "dlrm": ["--epochs", "1", "--rows", "20000", "--height", "20000"],
}


def checkpoint(program: Path, arguments: list[str]) -> dict:
    """What the program has saved at its end."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "checkpoint"
        subprocess.run([sys.executable, program, *arguments, "--checkpoint", file], check=True, stdout=sys.stderr)
        return torch.load(file)


def tensors(nest: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors and the numbers in a nest of dicts and lists, with their places."""
    if isinstance(nest, torch.Tensor):
        yield path, nest.double()
    elif isinstance(nest, float | int):
        yield path, torch.tensor(float(nest))
    elif isinstance(nest, dict):
        for key, value in nest.items():
            yield from tensors(value, f"{path}/{key}")
    elif isinstance(nest, list | tuple):
        for number, value in enumerate(nest):
            yield from tensors(value, f"{path}/{number}")


def difference(alone: dict, ours: dict) -> tuple[float, str]:
    """The largest difference of two numbers in the same place, as a share of the largest of their tensor; its place."""
    expected, found = dict(tensors(alone)), dict(tensors(ours))
    if expected.keys() != found.keys():
        raise SystemExit(f"only one of the programs has saved {sorted(expected.keys() ^ found.keys())}")
    differences = {
        path: float((found[path] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        for path, value in expected.items()
        if value.numel()
    }
    worst = max(differences, key=differences.__getitem__)
    return differences[worst], worst


def main() -> int:
    name, *arguments = sys.argv[1:] or [""]
    largest = 0.0
    for each in [name] if name else ARGUMENTS:
        given = arguments or ARGUMENTS[each]
        alone, ours = (checkpoint(HERE / file, given) for file in (f"{each}_torch.py", f"{each}.py"))
        found, path = difference(alone, ours)
        print(f"{each:<8} largest difference from torch alone: {found:.1e}, of {path}", flush=True)
        largest = max(largest, found)
    return int(largest > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
