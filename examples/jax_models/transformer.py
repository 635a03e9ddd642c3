"""A transformer of flax learns to write as Python's manual does, and writes a sample at the end."""

import argparse

import jax
import jax.numpy as jnp
import optax
from data import end_epoch, manual, resume
from models import Transformer

import central_storage as cs
import central_storage.jax as csj


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--pieces", type=int, default=640, help="pieces of 64 characters in the training data")
    parser.add_argument(
        "--checkpoint", default="", help="continue from this file if it exists; write it at every epoch"
    )
    options = parser.parse_args()
    batches, characters = manual(rows=32, length=64, pieces=options.pieces)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, 20, 6 * len(batches))

    net = Transformer(len(characters), 64)
    parameters = net.init(jax.random.key(0), jnp.zeros((1, 64), jnp.int32))
    model, state = resume(options.checkpoint, batches, parameters)
    matrices = jax.tree.map(lambda leaf: leaf.ndim > 1, model)
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]).scope() as strategy:
        model = csj.centralize(model)
    optimizer = csj.optim.chain(csj.optim.clip_by_global_norm(1.0), csj.optim.adamw(schedule, mask=matrices))
    csj.load_state(optimizer, model, state or csj.state(optimizer, model))
    train = csj.step(model, optimizer)(net.loss)

    while batches.epoch < options.epochs:
        *_, loss = train.ahead(csj.batches(strategy, batches))
        said = f"loss {loss:.4f}"
        end_epoch(options.checkpoint, batches, said, csj.read(model), csj.state(optimizer, model))
    print("".join(characters[number] for number in net.sample(csj.read(model), [0], 60)))


if __name__ == "__main__":
    main()
