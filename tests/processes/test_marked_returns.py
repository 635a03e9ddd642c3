"""Returns by mark, in real processes: the results and variables are those of replicas that send every Return."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.harness.processes import MAILBOXES, run
from tests.harness.timing import unit

from cs_runtime.transport.rings import IS_ORDERED

SCRIPT = """
import os, signal, sys
import numpy as np
import central_storage as cs

STEPS, KILLS = 60, int(sys.argv[1])

def train(kills, **options):
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], seed=3, **options) as strategy:
        with strategy.scope():
            w = cs.Variable(np.linspace(-1, 1, 100, dtype=np.float32), aggregation=cs.VariableAggregation.SUM)
        optimizer = cs.optimizers.Adam(0.01)

        def step(k):
            k, replica = int(k[0]), cs.get_replica_context().replica_id_in_sync_group
            (gradient,) = cs.gradient_buffers([w])
            gradient[...] = np.asarray(w) * (replica + 1) + k
            optimizer.apply_gradients([(gradient, w)])
            if k % 17 == 5:
                w.assign_add(np.ones(100, np.float32))  # another note
            return "long" * 1000 if k % 13 == 7 else float(w.numpy()[k % 100]) if k % 11 == 3 else k + replica

        said, batches = [], [np.full(2, k) for k in range(STEPS)]

        def note(k, result):
            said.append(strategy.experimental_local_results(result))
            if kills and k % (STEPS // 3) == 10 and len(killed) < kills:
                killed.append(strategy.statistics().pid)
                os.kill(killed[-1], signal.SIGKILL)

        killed = []
        for k, batch in enumerate(batches):
            note(k, strategy.run(step, (batch,)))
        for lookahead in (0, 1, 2, 5):
            steps = strategy.run_steps(step, strategy.experimental_distribute_dataset(batches), lookahead=lookahead)
            for k, result in enumerate(steps):
                note(k, result)
                if k % 20 == 19:
                    said.append(strategy.experimental_local_results(strategy.run(step, (batches[k],))))
        return repr(said), w.numpy().tobytes(), len(killed)

if __name__ == "__main__":
    here = train(0, in_process=True)
    print("in processes", file=sys.stderr)
    there = train(KILLS, max_restarts=100)
    assert here[:2] == there[:2]
    assert there[2] == KILLS
    print("the same")
"""


@pytest.mark.timeout(unit(150))
@pytest.mark.parametrize("kills", [0, 6])
def test_it_is_the_same_training(tmp_path: Path, kills: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = run(str(tmp_path / "train.py"), str(kills), environment={"CS_LOG": "debug"}, timeout=unit(120)).ok()
    assert ended.lines[-1] == "the same"
    _, _, logged = ended.err.partition("in processes")
    marks, sent = (len(re.findall(each, logged)) for each in ("leave the mark of run", r"send Return\("))
    if MAILBOXES and IS_ORDERED:
        assert marks > sent > 0
    else:
        assert sent > marks == 0
