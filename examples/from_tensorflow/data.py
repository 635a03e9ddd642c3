"""The data and the initial weights of both programs of a pair."""

import numpy as np

F32 = np.float32


def spirals(rows: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Points of three spiral arms, float32 ``[rows, 2]``; their arms, int32 ``[rows]``; weights of a network."""
    random = np.random.default_rng(0)
    arm, radius = random.integers(0, 3, rows), random.random(rows)
    angle = 4 * radius + arm * 2 * np.pi / 3 + random.normal(0, 0.1, rows)
    points = radius[:, None] * np.stack([np.sin(angle), np.cos(angle)], axis=1)
    shapes = [(2, 32), (32,), (32, 3), (3,)]
    weights = [random.normal(0, 0.5, shape) if len(shape) == 2 else np.zeros(shape) for shape in shapes]
    return points.astype(F32), arm.astype(np.int32), [weight.astype(F32) for weight in weights]


def ratings(users: int, items: int, rank: int, count: int) -> tuple[tuple[np.ndarray, ...], list[np.ndarray]]:
    """Users and items, int32 ``[count]``; ratings, float32 ``[count]``; two tables with ``rank`` columns."""
    random = np.random.default_rng(0)
    tables = [random.normal(0, 0.5, (rows, rank)) for rows in (users, items)]
    who, what = random.integers(0, users, count), random.integers(0, items, count)
    rating = np.einsum("nk,nk->n", 2 * tables[0][who], 2 * tables[1][what]) + random.normal(0, 0.1, count)
    begin = [random.normal(0, 0.3, table.shape).astype(F32) for table in tables]
    return (who.astype(np.int32), what.astype(np.int32), rating.astype(F32)), begin
