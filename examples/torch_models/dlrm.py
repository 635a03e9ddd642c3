"""A recommender learns from clicks: most of its parameters lie in tables of which a step reads and
changes a few rows."""

import argparse
import os

import torch
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
    parser.add_argument("--checkpoint", default="", help="continue from this file if it exists; write it at every epoch")
    options = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(Clicks(options.rows, options.tables, options.height), batch_size=1024)

    strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = cst.centralize(DLRM(options.tables, options.height, options.width))
    rows = cst.optim.SparseAdam(model.tables.parameters(), lr=1e-2)
    dense = cst.optim.Adagrad([*model.bottom.parameters(), *model.top.parameters()], lr=1e-2)
    first = 0
    if os.path.exists(options.checkpoint):
        saved = torch.load(options.checkpoint)
        first = saved["epoch"]
        model.load_state_dict(saved["model"])
        rows.load_state_dict(saved["rows"])
        dense.load_state_dict(saved["dense"])

    @cst.step(model, rows, dense)
    def train(numbers, categories, clicks):
        return F.binary_cross_entropy_with_logits(model(numbers, categories), clicks)

    for epoch in range(first, options.epochs):
        losses = [train(batch) for batch in cst.batches(strategy, loader)]
        print(f"epoch {epoch}  loss {sum(losses) / len(losses):.4f}", flush=True)
        if options.checkpoint:
            states = {"model": model.state_dict(), "rows": rows.state_dict(), "dense": dense.state_dict()}
            torch.save({**states, "epoch": epoch + 1}, options.checkpoint)


if __name__ == "__main__":
    main()
