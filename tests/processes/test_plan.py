"""``cs-launch --plan``: what it prints for a script, that it trains nothing, and what the guide shows of it."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from tests.harness.processes import run

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/guide/more-machines.md"

TRAIN = """
import os
import sys

import numpy as np
import central_storage as cs

strategy = cs.CentralStorageStrategy()
resolver = strategy.cluster_resolver
print("resolver", None if resolver is None else resolver.cluster_spec().as_dict())
with strategy.scope():
    w = cs.Variable(np.zeros(1_000_000, np.float32))
    optimizer = cs.optimizers.Adam()

def step(x):
    print("a replica has run", flush=True)
    optimizer.apply_gradients([(x, w)])

print("ended" if sys.argv[1:] == ["ends"] else "steps")
if sys.argv[1:] == ["fails"]:
    sys.exit(7)
if sys.argv[1:] != ["ends"]:
    strategy.run(step, args=(np.ones(1_000_000, np.float32),))
    print("a step was made", flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def test_it_ends_without_a_step(script: Path) -> None:
    ended = run("cs-launch", "--serve", "4", "--plan", script).ok()
    assert "runs up to its first step" in ended.err
    assert "steps" in ended.err.splitlines()
    assert "a replica has run" not in ended.err + ended.out
    assert "a step was made" not in ended.err + ended.out
    assert ended.lines[0] == "plan: 4 workers on 4 nodes, variables on cpu:0 of this machine"
    for said in ("machine 4 ", "10 Gbit/s *", "assumed: --bandwidth names another", "each worker 4.0 MB of variables"):
        assert said in ended.out
    host = socket.gethostname().lower()
    spec = {"chief": [host], "ps": [f"{host}:0"], "worker": ["elsewhere"] * 4}
    assert f"resolver {spec}" in ended.err


def test_on_one_machine_nothing_travels(script: Path) -> None:
    ended = run("cs-launch", "--devices", "cpu:0,cpu:1", "--plan", script).ok()
    assert ended.lines[0] == (
        "plan: 2 workers on this machine (cpu:0, cpu:1), variables on cpu:0; nothing travels over a network"
    )
    assert "resolver None" in ended.err
    assert "Gbit/s" not in ended.out


def test_a_script_that_never_steps(script: Path) -> None:
    ended = run("cs-launch", "--serve", "2", "--plan", script, "ends").ok()
    assert "[cs-launch] no step came: the script ended by itself" in ended.err
    assert "plan: 2 workers" in ended.out


def test_a_script_that_fails_plans_nothing(script: Path) -> None:
    ended = run("cs-launch", "--serve", "2", "--plan", script, "fails")
    assert (ended.code, ended.out) == (7, "")
    assert ended.err.splitlines()[-1] == "[cs-launch] the script failed before its first step (exit code 7)"


def test_a_script_without_a_strategy(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    ended = run("cs-launch", "--serve", "2", "--plan", path)
    assert (ended.code, ended.out) == (2, "")
    assert "has made no CentralStorageStrategy: there is nothing to plan" in ended.err


def test_what_does_not_fit_at_the_head(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import numpy as np, central_storage as cs\n"
        "strategy = cs.CentralStorageStrategy()\n"
        "with strategy.scope():\n"
        "    cs.Variable(np.broadcast_to(np.float32(0.5), (10_000_000_000,)))\n"
        "strategy.run(lambda: None)\n"
    )
    ended = run("cs-launch", "--serve", "2", "--plan", path)
    assert ended.code == 1, str(ended)
    assert "does not fit at the head: " in ended.out


def masked(text: str) -> str:
    """Without what depends on the memory and the processors of the machine, by which the server plans its undo area."""
    text = re.sub(r"[\d.]+ [kMG]B available", "N available", text)
    text = re.sub(r"(arenas and other) [\d.]+ [kM]B", r"\1 N", text)
    return re.sub(r"(this machine \(head\) .*?) +[\d.]+ [kM]B", r"\1 N", text)


def test_the_guide_shows_what_it_prints() -> None:
    shown = re.search(r"    (cs-launch [^\n]*--plan [^\n]*)\n\n```text\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert shown is not None
    command, text = shown[1].split(), shown[2]
    assert masked(run(*command).ok().out) == masked(text)
