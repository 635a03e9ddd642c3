"""cs-ctl estimate: the same numbers as cs-ctl status in the middle of the training; scripts that end in other ways."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.harness.processes import ROOT, Ended, run, start

from central_storage.ctl import services
from central_storage.planning import estimate
from cs_proto.memory_plan import PAGE_NBYTES

#: Trains until it is ended: ``elements`` of a variable, replicas, which optimizers, and how steps are made.
TRAIN = """
import sys
import numpy as np
import central_storage as cs

size, replicas, kind, loop = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
strategy = cs.CentralStorageStrategy([f"cpu:{number}" for number in range(replicas)])
with strategy.scope():
    shape = (size // 16, 16) if kind == "table" else size
    w = cs.Variable(np.ones(shape, np.float32), name="w", sparse=kind == "table")
    v = cs.Variable(np.ones(30_000, np.float32), name="v")
    counts = cs.Variable(np.arange(1000), trainable=False)
    if kind == "momentum":
        first = cs.optimizers.SGD(0.01, momentum=0.9)
    elif kind == "table":
        first = cs.optimizers.Adagrad()
    else:
        first = cs.optimizers.Adam()
    second = cs.optimizers.AdamW() if kind == "two" else None

@cs.function
def step(batch):
    rest = [(np.ones(30_000, np.float32), v)]
    if kind == "table":
        first.apply_gradients([(cs.IndexedSlices(np.ones((500, 16), np.float32), np.arange(500)), w), *rest])
    elif second is not None:
        cs.optimizers.apply_gradients([(first, [(np.ones(size, np.float32), w)]), (second, rest)])
    else:
        first.apply_gradients([(np.ones(size, np.float32), w), *rest])

batches = cs.data.Dataset.from_tensor_slices(np.ones((2560, 256), np.float32)).batch(256).repeat()

def steps():
    if loop == "run":
        while True:
            yield strategy.run(step, args=(np.ones((256, 256), np.float32),))
    distributed = strategy.experimental_distribute_dataset(batches)
    if loop == "run_steps":
        yield from strategy.run_steps(step, distributed)
    for batch in distributed:
        yield strategy.run(step, args=(batch,))

for number, _ in enumerate(steps()):
    if number == 20:
        print("address", strategy.address, flush=True)
"""

#: As above: so many variables of so many elements each, updated by an optimizer of a class.
MANY = """
import sys
import numpy as np
import central_storage as cs

count, size, replicas, kind = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
strategy = cs.CentralStorageStrategy([f"cpu:{number}" for number in range(replicas)])
with strategy.scope():
    variables = [cs.Variable(np.ones(size, np.float32)) for _ in range(count)]
    optimizer = getattr(cs.optimizers, kind)()

@cs.function
def step():
    optimizer.apply_gradients([(np.ones(size, np.float32), variable) for variable in variables])

number = 0
while True:
    strategy.run(step)
    number += 1
    if number == 20:
        print("address", strategy.address, flush=True)
"""

#: What the scripts of the other tests begin with.
BEGIN = """
import atexit, os, sys
import numpy as np
import central_storage as cs
"""
MODEL = (
    BEGIN
    + """
strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"])
with strategy.scope():
    w = cs.Variable(np.zeros(250_000, np.float32), name="w")
    optimizer = cs.optimizers.SGD(0.1)

def step():
    print("a replica has run", flush=True)
    optimizer.apply_gradients([(np.ones(250_000, np.float32), w)])
"""
)
#: The bytes of ``w`` there: a variable takes whole pages, but for those that it shares with its neighbours.
WHOLE = -(-1_000_000 // PAGE_NBYTES) * PAGE_NBYTES
#: The kinds whose layout the plan follows page by page.
EXACT = ("parameters", "slots", "gradients")
_MOST_LOOKS = 20


def estimated(*arguments: object, code: int = 0, timeout: float | None = None) -> dict[str, Any]:
    """What ``cs-ctl estimate --json`` prints."""
    ended = run("cs-ctl", "estimate", "--json", *map(str, arguments), timeout=timeout)
    assert ended.code == code, str(ended)
    return dict(json.loads(ended.out))


def of(directory: Path, text: str) -> Path:
    path = directory / "train.py"
    path.write_text(text)
    return path


def is_near(planned: dict[str, Any], measured: dict[str, int], *, keeps_pieces: bool = False) -> bool:
    """As the guide says: within 5 per cent, and *other* is the most that the server writes down. ``keeps_pieces``: the
    plan counts old values of tables or of LAMB."""
    kinds, cores = planned["by_kind"], len(os.sched_getaffinity(0))
    young = 70_000 + 40_000 * len(planned["devices"]) + 700 * planned["variables"]
    least = kinds["other"] - young - (cores << 20 if keeps_pieces else 0)
    return (
        all(abs(kinds[kind] - measured[kind]) <= 0.05 * measured[kind] for kind in EXACT)
        and abs(kinds["arenas"] - measured["arenas"]) <= max(0.05 * measured["arenas"], 64 << 10)
        and least <= measured["other"] <= kinds["other"]
    )


@pytest.mark.parametrize(
    ("size", "replicas", "kind", "loop"),
    [
        (1_000_000, 2, "adam", "run"),
        (500_000, 3, "momentum", "loop"),
        (2_000_000, 1, "two", "run_steps"),
        (4_000_000, 2, "table", "run_steps"),
    ],
)
def test_an_estimate_is_what_a_training_takes(tmp_path: Path, size: int, replicas: int, kind: str, loop: str) -> None:
    arguments = [str(of(tmp_path, TRAIN)), str(size), str(replicas), kind, loop]
    planned = estimated(*arguments)["strategies"][0]
    with start(*arguments, environment={"CS_LOG_DIR": None}) as child:
        address = child.wait_for(r"^address (.*)$")[1]
        for _ in range(_MOST_LOOKS):  # the thread that reads ahead may not have used all places yet
            measured = json.loads(run("cs-ctl", "status", "--json", address).ok().out)["shared_nbytes"]
            if is_near(planned, measured, keeps_pieces=kind == "table"):
                break
        else:
            pytest.fail(f"planned {planned['by_kind']}, measured {measured}")
        assert abs(planned["nbytes"] - sum(measured.values())) <= 0.05 * sum(measured.values())
        said = child.wait_for(r"^\[central-storage\] planned memory: .*", stream="err")[0]
    services.clean()  # it is killed at the end
    assert "available" in said
    assert f"gradients {replicas} x " in said


@pytest.mark.parametrize(
    ("count", "size", "replicas", "kind"),
    [(3, 10, 1, "Adam"), (600, 10, 2, "Adam"), (2, 200_000, 2, "LAMB"), (40, 3000, 1, "SGD")],
)
def test_an_estimate_of_small_variables(tmp_path: Path, count: int, size: int, replicas: int, kind: str) -> None:
    arguments = [str(of(tmp_path, MANY)), str(count), str(size), str(replicas), kind]
    planned = estimated(*arguments)["strategies"][0]
    with start(*arguments, environment={"CS_LOG_DIR": None}) as child:
        address = child.wait_for(r"^address (.*)$")[1]
        measured = json.loads(run("cs-ctl", "status", "--json", address).ok().out)["shared_nbytes"]
    services.clean()  # it is killed at the end
    assert is_near(planned, measured, keeps_pieces=kind == "LAMB"), f"planned {planned['by_kind']}, measured {measured}"
    assert [planned["by_kind"][each] for each in EXACT] == [measured[each] for each in EXACT]


def test_the_script_ends_before_its_first_step_whatever_it_catches(tmp_path: Path) -> None:
    script = of(
        tmp_path,
        MODEL
        + """
atexit.register(print, "exit functions run")
try:
    try:
        strategy.run(step)
    except Exception:
        print("caught")
    print("gone on")
finally:
    print("cleaned up")
""",
    )
    ended = run("cs-ctl", "estimate", str(script)).ok()
    warning, why, *own = ended.err.splitlines()
    assert warning.startswith(f"[cs-ctl] {script} runs up to its first step, with all that it does before")
    assert why == "[central-storage] CS_ESTIMATE is set: this script ends before its first step"
    assert own == ["cleaned up", "exit functions run"]
    assert "fits: " in ended.out
    assert [line.split()[0] for line in ended.lines if line.startswith(("server", "w0", "w1", "script"))] == [
        *("server", "w0", "w1", "script")
    ]


def test_other_devices_and_another_optimizer(tmp_path: Path) -> None:
    script = of(tmp_path, MODEL + "strategy.run(step)\n")
    asked = ["--devices", "cpu:0,cpu:1,cpu:2,cpu:3", "--optimizer", "adam", script]
    (plain,), (other,) = estimated(script)["strategies"], estimated(*asked)["strategies"]
    assert (plain["devices"], plain["by_kind"]["slots"]) == (["cpu:0", "cpu:1"], 0)
    assert other["by_kind"]["gradients"] == 2 * plain["by_kind"]["gradients"] > 0
    assert other["by_kind"]["slots"] == 2 * other["by_process"]["w3"]["gradients"] == 2 * WHOLE


def test_a_wrapper_and_a_script_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The script is started by another one, and handles even what ends it."""
    script = of(tmp_path, MODEL + "while True:\n    try:\n        strategy.run(step)\n    except BaseException: pass\n")
    monkeypatch.setattr(estimate, "_GRACE", 0.1)
    outcome = estimate.tried([str(script)], None, None)
    assert (outcome.reason, outcome.was_killed) == ("step", True)
    assert [each.plan.parameters for each in estimate.estimates(outcome, None)] == [WHOLE]
    wrapper = tmp_path / "wrapper.py"
    script.write_text(MODEL + "strategy.run(step)\n")
    run_it = f"subprocess.run([sys.executable, {str(script)!r}]).returncode"
    wrapper.write_text(f"import subprocess, sys\nsys.exit({run_it})")
    assert estimated(wrapper)["nbytes"] > 3_000_000
    assert "a replica has run" not in capfd.readouterr().err


def test_the_end_of_a_process_that_the_script_has_started_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = tmp_path / "helper.py"
    helper.write_text(BEGIN + "cs.CentralStorageStrategy(['cpu:0'])\n")
    first = f"import subprocess, sys\nsubprocess.run([sys.executable, {str(helper)!r}], check=True)\n"
    script = of(tmp_path, first + MODEL + "strategy.run(step)\n")
    monkeypatch.setattr(estimate, "_GRACE", 0.0)
    outcome = estimate.tried([str(script)], None, None)
    assert outcome.reason == "step"
    assert [each.plan.parameters for each in estimate.estimates(outcome, None)] == [WHOLE]


def test_a_variable_that_was_left_over_ends_no_training_in_silence(tmp_path: Path) -> None:
    script = of(tmp_path, MODEL + "strategy.run(step)\n")
    ended = run(str(script), environment={"CS_ESTIMATE": str(tmp_path / "gone")})
    assert ended.code == 1
    assert "unset CS_ESTIMATE to train" in ended.err


def test_a_table_larger_than_the_machine_does_not_fit(tmp_path: Path) -> None:
    text = """
strategy = cs.CentralStorageStrategy(["cpu:0"])
with strategy.scope():
    rows = np.broadcast_to(np.float32(0.5), (10_000_000_000, 256))
    table = cs.Variable(rows, name="table", sparse=True)
    adagrad = cs.optimizers.RowwiseAdagrad(0.1)
assert table[:3].shape == (3, 256)
strategy.run(lambda: adagrad.apply_gradients([(cs.IndexedSlices(np.ones((1, 256), np.float32), [1]), table)]))
"""
    found = estimated(of(tmp_path, BEGIN + text), code=1)
    assert not found["fits"]
    assert found["strategies"][0]["by_kind"]["parameters"] == 10_240_000_000_000
    assert found["strategies"][0]["by_kind"]["slots"] == 40_000_000_000
    assert found["strategies"][0]["sparse_nbytes"] == 10_280_000_000_000
    assert "the largest part is parameters" in found["misfits"][0]
    assert found["available_nbytes"] <= found["machine_nbytes"] < found["nbytes"]


def test_the_guide_names_the_fields_of_the_json(tmp_path: Path) -> None:
    found = estimated(of(tmp_path, MODEL + "strategy.run(step)\n"))
    said = (ROOT / "docs/guide/cs-ctl.md").read_text().partition("`cs-ctl estimate --json` prints")[2]
    fields = [*found, *found["strategies"][0], *found["strategies"][0]["by_kind"]]
    assert [name for name in fields if f"`{name}`" not in said] == []


def test_a_script_that_never_steps(tmp_path: Path) -> None:
    found = estimated(of(tmp_path, MODEL + "strategy.shutdown()\n"))
    assert found["reason"] == "end"
    assert found["strategies"][0]["variables"] == 1
    assert found["notes"][1].startswith("no step came: the script ended by itself")


def test_two_strategies_are_added_up(tmp_path: Path) -> None:
    more = "other = cs.CentralStorageStrategy()\nwith other.scope():\n    x = cs.Variable(np.zeros(1000))\n"
    found = estimated(of(tmp_path, MODEL + more + "strategy.run(step)\n"))
    first, second = found["strategies"]
    assert (len(first["devices"]), second["by_kind"]["parameters"]) == (2, 2 * PAGE_NBYTES)
    assert found["nbytes"] == first["nbytes"] + second["nbytes"]


def test_no_checkpoint_is_written(tmp_path: Path) -> None:
    save = f"strategy.save({str(tmp_path / 'kept')!r})\nstrategy.run(step)\n"
    found = estimated(of(tmp_path, MODEL + "w.assign(np.ones(250_000, np.float32))\n" + save))
    assert found["reason"] == "save"
    assert list(tmp_path.glob("kept*")) == []


def test_what_failed_before_it_planned_does_not_fit(tmp_path: Path) -> None:
    script = of(tmp_path, "raise ValueError('no data')\n")
    found = estimated(script, code=5)
    assert (found["fits"], found["strategies"]) == (False, [])
    assert run("cs-ctl", "estimate", str(script)).out == ""


def test_the_scripts_own_failure_is_told(tmp_path: Path) -> None:
    ended = run("cs-ctl", "estimate", str(of(tmp_path, MODEL + "raise ValueError('no data')\n")))
    assert ended.code == 5
    assert "ValueError: no data" in ended.err
    assert ended.err.splitlines()[-1] == "[cs-ctl] the script failed before its first step (exit code 1)"
    assert "no step came" in ended.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no script was given"),
        (("absent.py",), "there is no script 'absent.py' in "),
        (("--optimizer", "Adamm", "{script}"), "--optimizer Adamm: there is no such optimizer; there are SGD, "),
        (("--devices", "gpu:99", "{script}"), "device 'gpu:99' does not exist"),
        (("--",), "no script was given"),
        (("--", "{script}"), "has made no CentralStorageStrategy, so there is nothing to estimate"),
        (("{script}",), "has made no CentralStorageStrategy, so there is nothing to estimate"),
    ],
)
def test_what_cannot_be_estimated_is_refused(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    script = of(tmp_path, "pass\n")
    ended: Ended = run("cs-ctl", "estimate", *(each.format(script=script) for each in arguments))
    assert ended.code == 2
    assert message in ended.err
    assert not ended.out


def test_values_before_the_first_step_are_those_that_the_script_wrote(tmp_path: Path) -> None:
    text = """
with strategy.scope():
    small = cs.Variable([1.0, 2.0], name="small")
    big = cs.Variable(np.ones(1_000_000, np.float32))
    same = cs.Variable(np.zeros(3, np.float32), name="small")
small.assign_add([1.0, 1.0])
assert small.numpy().tolist() == [2.0, 3.0] and small.version == 1, small
assert big.numpy().sum() == 0 and big[5:7].shape == (2,)
assert same.name == "small_1"
optimizer.learning_rate = 0.5
assert float(optimizer.learning_rate) == 0.5 and optimizer.iterations == 0
adam = cs.optimizers.Adam()
assert adam.get_slot(small, "m").numpy().tolist() == [0.0, 0.0]
assert strategy.statistics().variables == 4
del same, big
assert [each.name for each in strategy.variables] == ["w", "small"]
strategy.run(step)
"""
    found = estimated(of(tmp_path, MODEL + text))
    (only,) = found["strategies"]
    assert (only["variables"], only["optimizers"]) == (2, 2)
    assert only["is_upper_bound"] is False
    assert only["by_kind"]["slots"] == 2 * PAGE_NBYTES  # Adam has slots of one variable, SGD has none


def test_no_file_is_left_and_the_environment_is_the_childs_alone(tmp_path: Path) -> None:
    script = of(tmp_path, MODEL + "strategy.run(step)\n")
    estimated(script)
    assert list(tmp_path.iterdir()) == [script]
    assert "CS_ESTIMATE" not in os.environ
