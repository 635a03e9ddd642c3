"""A catalogue of variables and optimizers by itself: a state over a store of its own, and no peers."""

from __future__ import annotations

import numpy as np
from tests.harness.playbook import ADDRESSES

from cs_proto.arrays import Array, array_of
from cs_proto.messages import VariableSpec
from cs_server.engine.catalogue import variables
from cs_server.engine.store.address_budget import Addresses
from cs_server.engine.store.control_log import ControlMemory
from cs_server.engine.store.state import Config, opened

SGD = {"learning_rate": 0.1, "momentum": 0.0, "nesterov": 0.0}
ADAGRAD = {"learning_rate": 0.1, "initial_accumulator_value": 0.1, "epsilon": 1e-7}
ROWWISE = {"learning_rate": 0.1, "initial_accumulator_value": 0.0, "epsilon": 1e-10, "weight_decay": 0.0}
FTRL = {
    "learning_rate": 0.1,
    "learning_rate_power": -0.5,
    "initial_accumulator_value": 0.1,
    "l1_regularization_strength": 0.0,
    "l2_regularization_strength": 0.0,
    "l2_shrinkage_regularization_strength": 0.0,
    "beta": 0.0,
}
ADAM = {"learning_rate": 0.1, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": 0.0}


def block(dtype: str, *shape: int) -> Array:
    return array_of(np.zeros(shape, dtype))


class Book:
    """A catalogue over a store of its own."""

    def __init__(self, replicas: int = 2, addresses: Addresses = ADDRESSES, device: str = "cpu:0") -> None:
        self.control = ControlMemory()
        self.replicas = replicas
        self.addresses = addresses
        self.device = device
        self.reopen()

    def reopen(self) -> None:
        config = Config(self.replicas, self.device, self.addresses, pid=1, started=0.0)
        self.state = opened(config, self.control)
        self.tables, self.out = self.state.tables, self.state.out

    def make(
        self,
        name: str,
        shape: tuple[int, ...] = (),
        dtype: str = "float32",
        trainable: bool = True,
        sparse: bool = False,
    ) -> int:
        spec = VariableSpec(name, dtype, shape, trainable, 0, 0, sparse=sparse)
        made, _ = variables.create(self.state, spec, None)
        self.tables.flush()
        return made.number
