"""A GPT of 3.2 million parameters reads Python's manual, and writes some lines of its own at the end."""

import argparse

import torch
from checkpoints import load, save
from data import Manual
from models import GPT
from torch.nn import functional as F
from torch.utils.data import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="characters of a piece")
    parser.add_argument(
        "--checkpoint", default="", help="continue from this file if it exists; write it every 20 steps"
    )
    options = parser.parse_args()
    manual = Manual(options.length)
    torch.manual_seed(0)
    numbers = torch.randint(len(manual), (options.steps, 16))  # of the pieces in each batch

    model = GPT(len(manual.characters), manual.length, options.layers)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    first = load(options.checkpoint, parts)
    loader = DataLoader(manual, batch_sampler=numbers[first:].tolist())

    def train(batch):
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    for step, batch in enumerate(loader, first + 1):
        loss = train(batch)
        schedule.step()
        if step % 20 == 0 or step == options.steps:
            save(options.checkpoint, parts, step)
            print(f"step {step}  loss {loss:.4f}", flush=True)
    print(manual.written(model.write(manual.tokens("The "), 300)))


if __name__ == "__main__":
    main()
