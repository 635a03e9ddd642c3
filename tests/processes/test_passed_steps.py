"""Steps that a program of the server carries out, in real processes.

Their server is killed between any two of its instructions, and workers beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.processes import MAILBOXES, run

import central_storage as cs
from cs_runtime.transport.rings import IS_ORDERED

pytestmark = pytest.mark.skipif(not (MAILBOXES and IS_ORDERED), reason="no marks without mailboxes")

STEPS = 24


def trained(
    strategy: cs.CentralStorageStrategy,
    lookaheads: Sequence[int | None],
    max_norm: float | None,
    turns: str,
    **bounds: float,
) -> tuple[list[Any], list[bytes]]:
    """Every result, and what all variables and slots hold in the end. ``lookaheads``: None stands for single runs.
    ``max_norm`` bounds the norm of all gradients, ``bounds`` are those of one optimizer. ``turns`` says by letters what
    the steps do in turns: train all variables, train others, train rows of tables, evaluate."""
    with strategy.scope():
        weights = cs.Variable(np.linspace(-1, 1, 300, dtype=np.float32), name="weights")
        others = [cs.Variable(np.ones(n, np.float64), name=f"v{n}") for n in (3, 40)]
        tables = [cs.Variable(np.ones((n, 8), np.float32), name=f"t{n}", sparse=True) for n in (50, 9) if "r" in turns]
        sgd, adam = cs.optimizers.SGD(0.1, momentum=0.5), cs.optimizers.Adam(0.01, **bounds)
        adagrad = cs.optimizers.Adagrad(0.1)

    def step(k: Any) -> float:
        number, replica = int(np.ravel(k)[0]), int(cs.get_replica_context().replica_id_in_sync_group)  # type: ignore[union-attr]
        what = turns[number % len(turns)]
        if what == "e":
            return float(np.sum(weights)) + replica
        if what == "o":
            (gradient,) = cs.gradient_buffers(others[:1])
            gradient[...] = np.asarray(others[1])[:3] * (replica + 1) - number
            sgd.apply_gradients([(gradient, others[0])])
            return float(gradient[1])
        if what == "r":
            named = []
            for table in tables:
                rows = np.arange(3 + number % 4 + replica) ** 2 % table.shape[0]  # some twice
                found = cs.nn.embedding_lookup(table, rows)
                named.append((cs.IndexedSlices(found * (replica + 1) + number, rows), table))
            adagrad.apply_gradients(named)
            return float(found[0, 0]) + replica
        gradients = cs.gradient_buffers([weights, *others])
        for gradient, variable in zip(gradients, [weights, *others], strict=True):
            gradient[...] = np.asarray(variable) * (replica + 1) + number
        groups = [(sgd, [(gradients[0], weights)]), (adam, list(zip(gradients[1:], others, strict=True)))]
        if max_norm is not None:
            cs.optimizers.apply_gradients(groups, global_clipnorm=max_norm, clip_epsilon=1e-6)
        else:
            for optimizer, pairs in groups:
                optimizer.apply_gradients(pairs)
        return float(gradients[0][7]) + replica

    said: list[Any] = []
    elements = [np.full(2, k) for k in range(STEPS)]
    for lookahead in lookaheads:
        if lookahead is None:
            results = [strategy.run(step, (element,)) for element in elements]
        else:
            data = strategy.experimental_distribute_dataset(elements)
            results = list(strategy.run_steps(step, data, lookahead=lookahead))
        said += [[float(each) for each in strategy.experimental_local_results(result)] for result in results]
    values = [np.asarray(v.numpy()).tobytes() for v in (weights, *others, *tables)]
    slots = [(sgd, weights, "momentum"), *((adam, v, slot) for v in others for slot in ("m", "v"))]
    slots += [(sgd, others[0], "momentum")] * ("o" in turns)
    slots += [(adagrad, table, "accumulator") for table in tables]
    return said, [*values, *(np.asarray(each.get_slot(v, slot)).tobytes() for each, v, slot in slots)]


def disturbed(
    items: list[str],
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    lookaheads: Sequence[Any],
    max_norm: float | None = None,
    turns: str = "t",
    **bounds: float,
) -> None:
    """The training is that of one process, although ``items`` happen in it, each once."""
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        expected = trained(strategy, lookaheads, max_norm, turns, **bounds)
    monkeypatch.setenv("CS_FAILPOINTS", ";".join(items))
    monkeypatch.setenv("CS_FAILPOINTS_DIR", str(directory))
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], max_restarts=1000) as strategy:
        assert trained(strategy, lookaheads, max_norm, turns, **bounds) == expected
    assert {path.name for path in directory.iterdir()} == set(items)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lookahead", [None, pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_server_is_killed_within_a_step(lookahead: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [f"server.pass=kill@{number}" for number in (1, 9, 11, 16, 23, 33)]
    disturbed(items, tmp_path, monkeypatch, [lookahead] * 6)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("max_norm", "bounds"),
    [
        pytest.param(1.0, {}, marks=pytest.mark.slow),
        pytest.param(None, {"clipnorm": 0.5}, marks=pytest.mark.slow),
        (3.0, {"clipvalue": 0.5, "global_clipnorm": 2.0}),
    ],
)
def test_a_server_is_killed_within_a_step_with_bounds(
    max_norm: float | None, bounds: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [f"server.pass=kill@{number}" for number in (8, 9, 10, 11, 12, 14, 17)]
    disturbed(items, tmp_path, monkeypatch, [None] * 6, max_norm, **bounds)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("lookaheads", "turns"),
    [
        pytest.param(lookaheads, turns, marks=() if number + place == 2 else pytest.mark.slow)
        for number, lookaheads in enumerate([[None], [2], [None, 1]])
        for place, turns in enumerate(["te", "teo", "ttoeoet"])
    ],
)
def test_a_server_is_killed_within_steps_of_several_kinds(
    turns: str, lookaheads: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [f"server.pass=kill@{number}" for number in (8, 11, 12, 40, 47, 60, 75)]
    disturbed(items, tmp_path, monkeypatch, lookaheads * (8 // len(lookaheads)), turns=turns)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("lookahead", "turns"),
    [(2, "r"), *[pytest.param(*each, marks=pytest.mark.slow) for each in ((None, "r"), (2, "rt"))]],
)
def test_a_server_is_killed_within_steps_with_rows(
    lookahead: Any, turns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [f"server.pass=kill@{number}" for number in (8, 11, 12, 14, 15, 16, 18, 40)]
    disturbed(items, tmp_path, monkeypatch, [lookahead] * 8, turns=turns)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("lookahead", "turns"), [(None, "t"), (2, "t"), (None, "teo"), (2, "teo"), (None, "r"), (2, "r"), (2, "tre")]
)
def test_a_server_is_killed_after_every_instruction(
    lookahead: Any, turns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after those of later steps that a program carries out."""
    items = [f"server.pass=kill@{number}" for number in range(1, 76 if len(turns) == 1 else 100)]
    disturbed(items, tmp_path, monkeypatch, [lookahead] * 64, turns=turns)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("lookahead", "turns"), [(None, "t"), (1, "t"), (None, "eto"), (1, "eto"), (1, "r")])
def test_workers_and_the_server_are_killed_within_a_step(
    lookahead: Any, turns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies when it has left its mark, and the server in the step for which it was left, or near it."""
    items = [f"server.pass=kill@{number}" for number in range(2, 40, 4)]
    items += [f"worker.returned[{number % 2}]=kill@{4 + number}" for number in range(10)]
    items += [f"worker.return[{number % 2}]=kill@{5 + number}" for number in range(5)]
    disturbed(items, tmp_path, monkeypatch, [lookahead] * 24, turns=turns)


def test_a_log_tells_how_many_steps_a_program_has_carried_out(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
import numpy as np
import central_storage as cs
with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
    with strategy.scope():
        w = cs.Variable(np.zeros(4, np.float32))
    optimizer = cs.optimizers.SGD(1.0)
    def step():
        (gradient,) = cs.gradient_buffers([w])
        gradient[...] = 1
        optimizer.apply_gradients([(gradient, w)])
    for _ in range(500):
        strategy.run(step)
    print(w.numpy().tolist(), strategy.statistics().captured)
""")
    ended = run(str(script), environment={"CS_LOG": "debug"}).ok()
    assert ended.lines[-1] == "[-1000.0, -1000.0, -1000.0, -1000.0] 499"
    passed = [int(each) for each in re.findall(r"(\d+) steps were carried out by a program", ended.err)]
    assert sum(passed) > 400


def test_a_program_carries_out_steps_of_several_kinds_in_turns(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
import numpy as np
import central_storage as cs
with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
    with strategy.scope():
        w = cs.Variable(np.zeros(4, np.float32))
    optimizer = cs.optimizers.SGD(1.0)
    def up():
        (gradient,) = cs.gradient_buffers([w])
        gradient[...] = 1
        optimizer.apply_gradients([(gradient, w)])
    def down():
        (gradient,) = cs.gradient_buffers([w])
        gradient[...] = -2
        optimizer.apply_gradients([(gradient, w)])
    def evaluate():
        return float(np.asarray(w)[0])
    def in_turns(k):
        return (up, evaluate, down)[int(np.ravel(k)[0]) % 3]()
    for number in range(150):
        strategy.run(up), strategy.run(evaluate), strategy.run(down)
    data = strategy.experimental_distribute_dataset([np.full(2, k) for k in range(450)])
    for _ in strategy.run_steps(in_turns, data):
        pass
    print(w.numpy().tolist())
""")
    ended = run(str(script), environment={"CS_LOG": "debug"}).ok()
    assert ended.lines[-1] == "[600.0, 600.0, 600.0, 600.0]"
    passed = [int(each) for each in re.findall(r"(\d+) steps were carried out by a program", ended.err)]
    assert sum(passed) > 450
