"""A recommender learns from clicks: of its tables, which have most of the parameters, a step needs few rows."""

import argparse

import torch
from checkpoints import load, save
from data import Clicks
from models import DLRM
from torch.nn import functional as F
from torch.utils.data import DataLoader

import central_storage as cs
import central_storage.torch as cst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--height", type=int, default=100_000, help="rows of each table")
    parser.add_argument("--width", type=int, default=32, help="columns of each table")
    parser.add_argument("--checkpoint", default="", help="continue from this file if it exists; write it each epoch")
    options = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(Clicks(options.rows, options.tables, options.height), batch_size=1024)

    strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = cst.centralize(DLRM(options.tables, options.height, options.width))
    rows = cst.optim.SparseAdam(model.tables.parameters(), lr=1e-2)
    dense = cst.optim.Adagrad([*model.bottom.parameters(), *model.top.parameters()], lr=1e-2)
    parts = {"model": model, "rows": rows, "dense": dense}
    first = load(options.checkpoint, parts)

    @cst.step(model, rows, dense)
    def train(numbers, categories, clicks):
        return F.binary_cross_entropy_with_logits(model(numbers, categories), clicks)

    for epoch in range(first, options.epochs):
        losses = [train(batch) for batch in cst.batches(strategy, loader)]
        save(options.checkpoint, parts, epoch + 1)
        print(f"epoch {epoch}  loss {sum(losses) / len(losses):.4f}", flush=True)


if __name__ == "__main__":
    main()
