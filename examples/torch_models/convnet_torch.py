"""A ConvNet with BatchNorm and dropout learns the digits, with torch alone."""

import argparse
import os

import torch
from data import digits
from models import ConvNet
from torch.nn import functional as F
from torch.utils.data import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--checkpoint", default="", help="continue from this file if it exists; write it at every epoch")
    options = parser.parse_args()
    training, (images, labels) = digits()
    torch.manual_seed(0)
    loader = DataLoader(training, batch_size=100, shuffle=True, generator=torch.Generator().manual_seed(0))

    model = ConvNet(options.dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=options.epochs * len(loader))
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    first = 0
    if os.path.exists(options.checkpoint):
        saved = torch.load(options.checkpoint)
        first = saved.pop("epoch")
        loader.generator.set_state(saved.pop("order"))
        for name, state in saved.items():
            parts[name].load_state_dict(state)

    def train(batch):
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    for epoch in range(first, options.epochs):
        model.train()
        for batch in loader:
            loss = train(batch)
            schedule.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(images).argmax(dim=1) == labels).float().mean()
        print(f"epoch {epoch}  loss {loss:.4f}  accuracy {accuracy:.3f}", flush=True)
        if options.checkpoint:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**states, "epoch": epoch + 1, "order": loader.generator.get_state()}, options.checkpoint)


if __name__ == "__main__":
    main()
