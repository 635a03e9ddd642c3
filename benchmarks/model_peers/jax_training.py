"""What the programs of JAX train: the model, the batches and the optimizer of each work, as plain JAX."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_peers.obeying import BATCHES, IS_SMALL

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "jax_models"))

from models import Transformer, make_mlp, mlp_loss

CHARACTERS, LENGTH = 128, 64
ROWS = 16 if IS_SMALL else 64
SIZES = (64, 32, 10) if IS_SMALL else (64, 1024, 1024, 10)


@dataclass(frozen=True)
class Training:
    """A model to train. ``optimizer(of)`` makes its optimizer with what ``of`` has, which is optax or a module with the
    same names."""

    made: Callable[[], Any]
    batch: Callable[[np.random.Generator], tuple[np.ndarray, ...]]
    loss: Callable[..., Any]
    optimizer: Callable[[Any], Any]

    def batches(self) -> list[tuple[np.ndarray, ...]]:
        return [self.batch(np.random.default_rng(number)) for number in range(BATCHES)]


def _images(random: np.random.Generator) -> tuple[np.ndarray, ...]:
    return random.random((4 * ROWS, 64), np.float32), random.integers(10, size=4 * ROWS)


def _text(random: np.random.Generator) -> tuple[np.ndarray, ...]:
    return (random.integers(CHARACTERS, size=(ROWS // 2, LENGTH + 1), dtype=np.int32),)


_NET = Transformer(CHARACTERS, LENGTH)

TRAININGS = {
    "jax-mlp": Training(
        lambda: make_mlp(jax.random.key(0), SIZES),
        _images,
        mlp_loss,
        lambda of: of.adam(1e-3),
    ),
    "jax-transformer": Training(
        lambda: _NET.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32)),
        _text,
        _NET.loss,
        lambda of: of.chain(of.clip_by_global_norm(1.0), of.adamw(1e-3)),
    ),
}
