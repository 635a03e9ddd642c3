"""Train each model with torch alone and here, and print how far the parameters lie apart.

    python examples/torch_models/compare.py             # all models; needs torch: pip install torch==2.13.0
    python examples/torch_models/compare.py dlrm gpt

Each program writes a checkpoint in torch's own format. Everything in it is compared: the model, the state of the
optimizers and that of the schedule. The dropout of the ConvNet is 0 here, because two halves of a batch draw other random
numbers than the whole.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
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


def largest_difference(name: str) -> tuple[float, str]:
    """Of all numbers that a model's two programs have saved, as a share of the largest number of the same tensor."""
    alone, ours = (dict(tensors(checkpoint(HERE / file, ARGUMENTS[name]))) for file in (f"{name}_torch.py", f"{name}.py"))
    if alone.keys() != ours.keys():
        raise SystemExit(f"{name}: only one of the programs has saved {sorted(alone.keys() ^ ours.keys())}")
    differences = {
        path: float((ours[path] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        for path, value in alone.items()
        if value.numel()
    }
    worst = max(differences, key=differences.__getitem__)
    return differences[worst], worst


def main() -> None:
    for name in sys.argv[1:] or ARGUMENTS:
        difference, path = largest_difference(name)
        print(f"{name:<10} largest difference from torch alone: {difference:.1e}, of {path}", flush=True)


if __name__ == "__main__":
    main()
