"""An MLP learns the digits."""

import argparse

import jax
import optax
from data import digits, end_epoch, resume
from models import make_mlp, mlp_loss, share_right

import central_storage as cs
import central_storage.jax as csj


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--checkpoint", default="", help="continue from this file if it exists; write it at every epoch"
    )
    options = parser.parse_args()
    batches, test = digits(rows=100)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 30, 10 * len(batches))

    model, state = resume(options.checkpoint, batches, make_mlp(jax.random.key(0)))
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]).scope() as strategy:
        model = csj.centralize(model)
    optimizer = csj.optim.chain(csj.optim.clip_by_global_norm(1.0), csj.optim.adamw(schedule, weight_decay=1e-2))
    csj.load_state(optimizer, model, state or csj.state(optimizer, model))
    train = csj.step(model, optimizer)(mlp_loss)

    while batches.epoch < options.epochs:
        for batch in csj.batches(strategy, batches):
            loss = train(batch)
        right = share_right(csj.read(model), *test)
        said = f"loss {loss:.4f}  right {right:.3f}"
        end_epoch(options.checkpoint, batches, said, csj.read(model), csj.state(optimizer, model))


if __name__ == "__main__":
    main()
