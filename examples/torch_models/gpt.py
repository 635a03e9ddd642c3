"""A GPT of 3.2 million parameters reads Python's manual and writes some lines of its own."""

import argparse
import os
from itertools import islice

import torch
from data import Manual
from models import GPT
from torch.nn import functional as F
from torch.utils.data import DataLoader

import central_storage as cs
import central_storage.torch as cst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--checkpoint", default="", help="continue from this file if it exists; write it at the end")
    options = parser.parse_args()
    manual = Manual(length=128)
    torch.manual_seed(0)

    strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = cst.centralize(GPT(len(manual.characters), manual.length, options.layers))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = cst.optim.AdamW(groups, lr=1e-3, weight_decay=0.1, max_norm=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    first = 0
    if os.path.exists(options.checkpoint):
        saved = torch.load(options.checkpoint)
        first = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
    loader = DataLoader(manual, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(first))

    @cst.step(model, optimizer)
    def train(x, y):
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    for step, batch in enumerate(islice(cst.batches(strategy, loader), options.steps - first), first):
        loss = train(batch)
        schedule.step()
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step}  loss {loss:.4f}", flush=True)
    if options.checkpoint:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save({**states, "step": options.steps}, options.checkpoint)
    print(manual.written(cst.pull(model).write(manual.tokens("The "), 300)))


if __name__ == "__main__":
    main()
