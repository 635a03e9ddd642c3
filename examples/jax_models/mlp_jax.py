"""An MLP learns the digits."""

import argparse

import jax
import optax
from data import digits, end_epoch, resume
from models import make_mlp, mlp_loss, share_right


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
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-2))
    state = state or optimizer.init(model)

    @jax.jit
    def train(model, state, x, y):
        loss, gradients = jax.value_and_grad(mlp_loss)(model, x, y)
        updates, state = optimizer.update(gradients, state, model)
        return optax.apply_updates(model, updates), state, loss

    while batches.epoch < options.epochs:
        for x, y in batches:
            model, state, loss = train(model, state, x, y)
        right = share_right(model, *test)
        said = f"loss {loss:.4f}  right {right:.3f}"
        end_epoch(options.checkpoint, batches, said, model, state)


if __name__ == "__main__":
    main()
