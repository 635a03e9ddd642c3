"""What tests of updates share: hyperparameters under which every rule does something, and equality of bits."""

from __future__ import annotations

import numpy as np

from cs_server.rules import Array

__all__ = ["HYPERPARAMETERS", "assert_same_bits"]

HYPERPARAMETERS = {
    "learning_rate": 0.03,
    "momentum": 0.9,
    "beta_1": 0.9,
    "beta_2": 0.99,
    "epsilon": 1e-7,
    "rho": 0.8,
    "weight_decay": 0.01,
    "initial_accumulator_value": 0.1,
    "learning_rate_power": -0.4,
    "l1_regularization_strength": 0.02,
    "l2_regularization_strength": 0.01,
    "l2_shrinkage_regularization_strength": 0.03,
    "beta": 0.5,
    "dampening": 0.3,
    "nesterov": False,
    "maximize": True,
    "decoupled_weight_decay": False,
    "momentum_decay": 0.01,
    "lr_decay": 0.1,
    "eps_root": 1e-6,
    "eps_in_sqrt": True,
    "bias_correction": False,
}


def assert_same_bits(found: Array, expected: Array) -> None:
    """NaNs may be any."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    assert found[~nan].tobytes() == expected[~nan].tobytes()
