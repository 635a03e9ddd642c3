"""The models: an MLP in JAX alone, and a transformer in flax. Both programs of each train the same functions."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


def make_mlp(key: Any, sizes: tuple[int, ...] = (64, 256, 10)) -> Any:
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(key, (rows, columns)) * (2 / rows) ** 0.5, "b": jnp.zeros(columns)}
        for key, rows, columns in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def mlp(model: Any, x: Any) -> Any:
    *hidden, last = model
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def mlp_loss(model: Any, x: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(mlp(model, x), y).mean()


def share_right(model: Any, x: Any, y: Any) -> float:
    """The share of the images whose label the MLP finds."""
    return float((mlp(model, x).argmax(axis=1) == y).mean())


class Block(nn.Module):
    """Attention to what came before, and two layers."""

    heads: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))


class Transformer(nn.Module):
    """The next character after each of a text."""

    characters: int
    length: int
    width: int = 64
    layers: int = 2
    heads: int = 4

    @nn.compact
    def __call__(self, numbers: Any) -> Any:
        table = nn.Embed(self.characters, self.width)
        x = table(numbers) + nn.Embed(self.length, self.width)(jnp.arange(numbers.shape[-1]))
        for _ in range(self.layers):
            x = Block(self.heads)(x)
        return table.attend(nn.LayerNorm()(x))

    def loss(self, parameters: Any, pieces: Any) -> Any:
        """The mean over all characters but the first of each piece."""
        scores = self.apply(parameters, pieces[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(scores, pieces[:, 1:]).mean()

    def sample(self, parameters: Any, start: Any, count: int) -> list[int]:
        """The ``count`` likeliest characters after ``start``."""
        numbers = list(start)
        next_one = jax.jit(lambda given: self.apply(parameters, given).argmax(axis=-1))
        for _ in range(count):
            known = numbers[-self.length :]
            padded = jnp.array([known + [0] * (self.length - len(known))])
            numbers.append(int(next_one(padded)[0, len(known) - 1]))
        return numbers[len(start) :]
