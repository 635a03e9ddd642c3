"""A transformer of flax learns to write as Python's manual does, and writes a sample at the end."""

import argparse

import jax
import jax.numpy as jnp
import optax
from data import end_epoch, manual, resume
from models import Transformer


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
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, mask=matrices))
    state = state or optimizer.init(model)

    @jax.jit
    def train(model, state, pieces):
        loss, gradients = jax.value_and_grad(net.loss)(model, pieces)
        updates, state = optimizer.update(gradients, state, model)
        return optax.apply_updates(model, updates), state, loss

    while batches.epoch < options.epochs:
        for (pieces,) in batches:
            model, state, loss = train(model, state, pieces)
        said = f"loss {loss:.4f}"
        end_epoch(options.checkpoint, batches, said, model, state)
    print("".join(characters[number] for number in net.sample(model, [0], 60)))


if __name__ == "__main__":
    main()
