"""A checkpoint as a state that torch loads without running anything of it, and back by way of safetensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import central_storage as cs

NAMES = ["bool", "complex64", "complex128", "int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64"]


def test_torch_loads_an_export_with_weights_only(tmp_path: Path) -> None:
    values = {name: np.arange(6).reshape(2, 3).astype(name) for name in NAMES} | {"scalar": np.array(2.5)}
    path = cs.train.Checkpoint(root={name: cs.Variable(value) for name, value in values.items()}).write(tmp_path / "c")
    assert cs.train.export_checkpoint(path, tmp_path / "state.pt") == sorted(values)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state.keys() == values.keys()
    for name, value in values.items():
        assert (state[name].numpy().dtype, state[name].numpy().tolist()) == (value.dtype, value.tolist())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.safetensors", "state.pt"]


def test_the_state_of_a_model_goes_there_and_back(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    np.savez(tmp_path / "theirs.npz", **{name: tensor.numpy() for name, tensor in before.items()})
    names = cs.train.import_checkpoint(tmp_path / "theirs.npz", tmp_path / "ours")
    assert names == sorted(before)
    cs.train.export_checkpoint(tmp_path / "ours", tmp_path / "state.pt")
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
