"""A torch module whose parameters are central variables, and whose gradients lie in the memory that the server reads.

    python examples/torch_step.py        # needs torch: pip install torch==2.13.0

Nothing is copied: in a replica `torch.from_dlpack(variable)` is the parameter process's own memory, and autograd adds
into `gradient_buffers`. Follow two rules:

- Never write to the parameters; the central optimizer updates them. An in-place `p.add_()` changes only this process,
  and the run fails with VariableWrittenError, which names the variable.
- Call `bind` again in every step, because a commit may move a variable.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import central_storage as cs


def centralize(module: torch.nn.Module) -> dict[str, cs.Variable]:
    """Make a variable of every parameter of ``module`` in the current scope. Return them by the parameters' names.

    The parameters become empty, because the values are in the server now: the module is sent to replicas without them.
    """
    variables = {}
    for name, parameter in module.named_parameters():
        variables[name] = cs.Variable(parameter.detach().numpy(), name=name)
        parameter.data = parameter.data.new_empty(0)
    return variables


def bind(module: torch.nn.Module, variables: dict[str, cs.Variable]) -> list[np.ndarray]:
    """In a replica, point the parameters at the variables' memory and their ``.grad`` at gradient buffers of zeros.

    Return the buffers in the order of ``variables``, for ``apply_gradients``.
    """
    buffers = cs.gradient_buffers(list(variables.values()))
    for (name, variable), buffer in zip(variables.items(), buffers, strict=True):
        parameter = module.get_parameter(name)
        parameter.data = torch.from_dlpack(variable)
        buffer.fill(0)  # autograd adds to the buffer
        parameter.grad = torch.from_numpy(buffer)
    return buffers


def load(module: torch.nn.Module, variables: dict[str, cs.Variable]) -> None:
    """In the script, copy the variables' present values into the module."""
    for name, variable in variables.items():
        module.get_parameter(name).data = torch.from_numpy(variable.numpy())


def make_module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))


def make_loader() -> DataLoader:
    """Batches of 64 rows, the last of 8."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 20, generator=generator)
    y = (x @ torch.randn(20, 3, generator=generator)).argmax(dim=1)
    return DataLoader(TensorDataset(x, y), batch_size=64)


def train_centrally(epochs: int) -> torch.nn.Module:
    module = make_module()
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            variables = centralize(module)
            optimizer = cs.optimizers.SGD(learning_rate=0.05, momentum=0.9)

        @cs.function
        def step(batch: list[np.ndarray], rows: int) -> torch.Tensor:
            x, y = map(torch.from_dlpack, batch)
            gradients = bind(module, variables)
            loss = cross_entropy(module(x), y, reduction="sum") / rows  # the gradients of all replicas are summed
            loss.backward()
            optimizer.apply_gradients(zip(gradients, variables.values(), strict=True))
            return loss.detach()

        batches = strategy.experimental_distribute_dataset(make_loader())
        for epoch in range(epochs):
            losses = []
            for x, y in batches:
                rows = cs.nn.global_batch_size(y)
                losses.append(strategy.reduce("SUM", strategy.run(step, args=([x, y], rows)), axis=None))
            print(f"epoch {epoch}  loss {np.mean(losses):.4f}")
        load(module, variables)
    return module


def train_alone(epochs: int) -> torch.nn.Module:
    """The same training with torch alone, on whole batches."""
    module = make_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for x, y in make_loader():
            optimizer.zero_grad()
            cross_entropy(module(x), y).backward()
            optimizer.step()
    return module


def main() -> None:
    epochs = 10
    central, alone = train_centrally(epochs).state_dict(), train_alone(epochs).state_dict()
    difference = max(float((central[name] - alone[name]).abs().max()) for name in alone)
    print(f"largest difference from torch alone: {difference:.1e}")


if __name__ == "__main__":
    main()
