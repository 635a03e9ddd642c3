"""A ConvNet with BatchNorm and dropout learns the digits."""

import argparse

import torch
from checkpoints import load, save
from data import digits
from models import ConvNet
from torch.nn import functional as F
from torch.utils.data import DataLoader

import central_storage as cs
import central_storage.torch as cst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--checkpoint", default="", help="continue from this file if it exists; write it each epoch")
    options = parser.parse_args()
    training, (images, labels) = digits()
    torch.manual_seed(0)
    loader = DataLoader(training, batch_size=100, shuffle=True, generator=torch.Generator())

    strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = cst.centralize(ConvNet(options.dropout), sync_batchnorm=True)
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=options.epochs * len(loader))
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    first = load(options.checkpoint, parts)

    @cst.step(model, optimizer)
    def train(x, y):
        return F.cross_entropy(model(x), y)

    for epoch in range(first, options.epochs):
        loader.generator.manual_seed(epoch)
        model.train()
        for batch in cst.batches(strategy, loader):
            loss = train(batch)
            schedule.step()
        model.eval()
        with torch.no_grad():
            accuracy = (cst.pull(model)(images).argmax(dim=1) == labels).float().mean()
        save(options.checkpoint, parts, epoch + 1)
        print(f"epoch {epoch}  loss {loss:.4f}  accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
