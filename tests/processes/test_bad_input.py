"""Everything a user can do wrong is a typed error that names the thing and the remedy, and the strategy goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.harness.processes import run
from tests.harness.replicas import replica

import central_storage as cs
from central_storage import errors


@pytest.fixture
def still_works(two: cs.CentralStorageStrategy) -> Iterator[cs.CentralStorageStrategy]:
    """The strategy, which must be usable after whatever the test did to it."""
    yield two
    assert two.experimental_local_results(two.run(replica)) == (0, 1)


@pytest.fixture
def variable(two: cs.CentralStorageStrategy) -> cs.Variable:
    with two.scope():
        return cs.Variable(np.zeros((2, 3), np.float32), name="table", aggregation=cs.VariableAggregation.SUM)


@contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """The block raises ``kind``, and its message has all ``words``."""
    with pytest.raises(kind) as caught:
        yield
    for word in words:
        assert word in str(caught.value), str(caught.value)


# --- devices and starting -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (["GPU:7"], ("GPU:7", "cpu:0")),
        (["/job:localhost/replica:0/task:0/device:GPU:99"], ("GPU:99",)),
        (["tpu:0"], ("'tpu:0'", "cpu:0")),
        (["cpu:x"], ("'cpu:x'",)),
        ({"cpu:0"}, ("list",)),
        ("cpu:0", ("list", "write ['cpu:0']")),
        ("cpu:0,cpu:1", ("write ['cpu:0', 'cpu:1']",)),
        (0, ("from 1 to",)),
        ([], ("at least one",)),
        ([0], ("0",)),
    ],
)
def test_a_device_that_does_not_exist(devices: Any, words: tuple[str, ...]) -> None:
    with refused(errors.DeviceError, *words):
        cs.CentralStorageStrategy(devices)


def test_a_parameter_device_that_does_not_exist() -> None:
    with refused(errors.DeviceError, "GPU:7"):
        cs.CentralStorageStrategy(["cpu:0"], "GPU:7")


@pytest.mark.parametrize("seed", [-1, 1.5, True, 1 << 63])
def test_a_seed_that_is_none(seed: Any) -> None:
    with refused(errors.ConfigurationError, "seed", repr(seed)):
        cs.CentralStorageStrategy(["cpu:0"], seed=seed)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), True, "60"])
def test_a_start_timeout_that_is_none(timeout: Any) -> None:
    with refused(errors.ConfigurationError, "start_timeout", repr(timeout)):
        cs.CentralStorageStrategy(["cpu:0"], start_timeout=timeout)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no_such_script.py"], ["no_such_script.py"]),
        (["--devices", "gpu:7", "examples/digits.py"], ["gpu:7"]),
        (["--devices", "nonsense", "examples/digits.py"], ["nonsense"]),
        (["--no-such-option", "examples/digits.py"], ["--no-such-option"]),
        ([], ["script"]),
    ],
)
def test_a_launch_that_makes_no_sense(arguments: list[str], words: list[str]) -> None:
    ended = run("cs-launch", *arguments)
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err
    assert all(word in ended.err for word in words), ended


def test_the_launchers_devices_count_and_it_is_said(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import central_storage as cs\nprint(cs.CentralStorageStrategy(3).num_replicas_in_sync)\n")
    ended = run("cs-launch", "--devices", "cpu:0,cpu:1", script).ok()
    assert ended.lines == ["2"]
    banner, said = (line for line in ended.err.splitlines() if "cpu:0, cpu:1" in line)
    assert "2 workers (cpu:0, cpu:1)" in banner
    assert said.endswith(
        "the devices of the cs-launch command line count: cpu:0, cpu:1, parameters on cpu:0; "
        "the script's compute_devices=3 is not used"
    )


CONNECTS = """
import os, subprocess, sys
mine = ("CS_ROLE", "CS_DEVICES", "CS_PARAMETER_DEVICE")
environment = {name: value for name, value in os.environ.items() if name not in mine}
sys.exit(subprocess.run([sys.executable, sys.argv[1]], env=environment).returncode)
"""


def test_the_devices_of_a_connected_service_count_and_it_is_said(tmp_path: Path) -> None:
    script, connects = tmp_path / "script.py", tmp_path / "connects.py"
    connects.write_text(CONNECTS)
    script.write_text(
        "import central_storage as cs\nprint(cs.CentralStorageStrategy(3, 'cpu:7').num_replicas_in_sync)\n"
    )
    ended = run("cs-launch", "--devices", "cpu:0,cpu:1", connects, script).ok()
    (said,) = (line for line in ended.err.splitlines() if "is not used" in line)
    assert "the devices of the service in " in said
    assert said.endswith(
        "count: cpu:0, cpu:1, parameters on cpu:0; "
        "the script's compute_devices=3 and parameter_device='cpu:7' is not used"
    )


def test_a_script_written_with_devices_runs_under_a_bare_launcher(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import central_storage as cs\nstrategy = cs.CentralStorageStrategy(['cpu'] * 2)\n"
        "print(strategy.run(lambda: 1), strategy.num_replicas_in_sync)\n"
    )
    ended = run("cs-launch", script).ok()
    assert ended.lines == ["1 2"]
    (banner,) = (line for line in ended.err.splitlines() if "cpu:0" in line)
    assert "2 workers (cpu:0, cpu:1), parameters on cpu:0" in banner
    alone = run(script).ok()
    assert alone.lines == ended.lines
    assert alone.err.count("[central-storage] 2 replicas (cpu:0, cpu:1), parameters on cpu:0, transport ") == 1


@pytest.mark.slow
def test_a_second_strategy_of_a_launched_script_has_the_launchers_devices_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import central_storage as cs\nfor _ in range(2):\n    strategy = cs.CentralStorageStrategy()\n"
        "    print('replicas', strategy.num_replicas_in_sync)\n"
    )
    ended = run("cs-launch", "--devices", "cpu:0,cpu:1", script).ok()
    assert [line for line in ended.lines if line.startswith("replicas")] == ["replicas 2", "replicas 2"]


def test_use_after_shutdown() -> None:
    strategy = cs.CentralStorageStrategy(["cpu:0"])
    with strategy.scope():
        v = cs.Variable([1.0])
    strategy.shutdown()
    uses: list[Callable[[], Any]] = [
        lambda: strategy.run(replica),
        lambda: strategy.statistics(),
        lambda: v.numpy(),
        lambda: v.assign([2.0]),
    ]
    for use in uses:
        with refused(errors.ShutdownError, "shut down", "make a new CentralStorageStrategy"):
            use()


def test_a_strategy_inside_a_worker(still_works: cs.CentralStorageStrategy) -> None:
    with refused(errors.ContextError, "inside a worker"):
        still_works.run(lambda: cs.CentralStorageStrategy(["cpu:0"]))


# --- what is sent and what comes back ---------------------------------------------------------------------------------


def test_a_function_that_cannot_be_sent_names_what_it_captured(still_works: cs.CentralStorageStrategy) -> None:
    the_lock = threading.Lock()
    with refused(errors.ShippingError, "the_lock"):
        still_works.run(lambda: the_lock.locked())


def test_an_argument_that_cannot_be_sent(still_works: cs.CentralStorageStrategy) -> None:
    with refused(errors.ShippingError, "lock"):
        still_works.run(lambda x: None, args=(threading.Lock(),))


@pytest.mark.parametrize(
    ("result", "word"),
    [
        (lambda: object(), "object"),
        (lambda: {"deep": [1, {2, 3}]}, "set"),
        (lambda: np.array([object()]), "object"),
        (lambda: (x for x in "abc"), "generator"),
        (lambda: len, "builtin"),
    ],
    ids=["object", "set", "objects", "generator", "function"],
)
def test_a_result_that_is_not_data(still_works: cs.CentralStorageStrategy, result: Any, word: str) -> None:
    with refused(errors.ResultError, word):
        still_works.run(result)


@pytest.mark.parametrize("arguments", [3, "ab", np.zeros(2)])
def test_args_that_are_no_tuple(still_works: cs.CentralStorageStrategy, arguments: Any) -> None:
    with refused(ValueError, "args must be a list or tuple"):
        still_works.run(replica, args=arguments)


def test_an_exception_of_the_function(still_works: cs.CentralStorageStrategy) -> None:
    def look_up() -> None:
        {"a": 1}["no such key"]

    with pytest.raises(KeyError) as caught:
        still_works.run(look_up)
    assert isinstance(caught.value, errors.ReplicaError)
    assert caught.value.args == ("no such key",)
    assert caught.value.replica == 0
    assert "look_up" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("way", ["exit", "interrupt"])
def test_an_exit_inside_a_replica_is_an_exception(still_works: cs.CentralStorageStrategy, way: str) -> None:
    kind = SystemExit if way == "exit" else KeyboardInterrupt

    def leaves() -> None:
        raise kind(5)

    with pytest.raises(errors.ReplicaError) as caught:
        still_works.run(leaves)
    assert isinstance(caught.value, kind)


def test_arguments_are_read_only(still_works: cs.CentralStorageStrategy) -> None:
    def writes(x: np.ndarray) -> None:
        x += 1

    with refused(ValueError, "read-only"):
        still_works.run(writes, args=(np.zeros(100_000),))


# --- variables --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["client", "replica"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros((3, 2), np.float32), ("table", "(2, 3)", "(3, 2)")),
        (np.float32(1), ("table", "(2, 3)", "()")),
        (np.zeros((2, 3)), ("table", "float32", "float64", "astype")),
        (np.zeros((2, 3), np.int32), ("table", "float32", "int32")),
    ],
    ids=["shape", "scalar", "dtype", "integers"],
)
def test_a_value_that_does_not_fit(
    still_works: cs.CentralStorageStrategy, variable: cs.Variable, where: str, value: Any, words: tuple[str, ...]
) -> None:
    with refused(errors.InvalidArgumentError, *words):
        if where == "client":
            variable.assign(value)
        else:
            still_works.run(lambda: variable.assign(value))
    assert not variable.numpy().any()


@pytest.mark.parametrize(
    ("gradient", "words"),
    [
        (np.zeros((3, 2), np.float32), ("table", "(2, 3)", "(3, 2)")),
        (np.zeros((2, 3)), ("table", "float32", "float64")),
        (cs.IndexedSlices(np.zeros((1, 3), np.float32), np.array([2])), ("table", "row 2", "2 rows")),
        (cs.IndexedSlices(np.zeros((2, 3), np.float32), np.array([0, -1])), ("table", "row -1", "2 rows")),
        (cs.IndexedSlices(np.zeros((1, 2), np.float32), np.array([0])), ("table", "(2,)", "(3,)")),
        (cs.IndexedSlices(np.zeros((1, 3)), np.array([0])), ("table", "float64", "float32")),
        (cs.IndexedSlices(np.zeros((1, 3), np.float32), np.array([0]), (5, 3)), ("table", "(5, 3)", "(2, 3)")),
    ],
    ids=["shape", "dtype", "row", "negative row", "width of rows", "dtype of rows", "dense shape"],
)
def test_a_gradient_that_does_not_fit(
    still_works: cs.CentralStorageStrategy, variable: cs.Variable, gradient: Any, words: tuple[str, ...]
) -> None:
    with still_works.scope():
        optimizer = cs.optimizers.SGD(0.1)
    with refused(Exception, *words):
        still_works.run(lambda: optimizer.apply_gradients([(gradient, variable)]))
    assert optimizer.iterations == 0


def test_a_variable_of_another_strategy(still_works: cs.CentralStorageStrategy, variable: cs.Variable) -> None:
    optimizer = cs.optimizers.SGD(0.1)
    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as other:
        for wrong in (lambda: variable.assign(np.zeros((2, 3), np.float32)), lambda: (variable,)):
            with refused(Exception, "another strategy"):
                other.run(wrong)
        with refused(errors.ContextError, "another strategy"):
            other.run(lambda: optimizer.apply_gradients([(np.zeros((2, 3), np.float32), variable)]))
        with other.scope(), refused(errors.ContextError, "inside the scope of another"):
            variable.assign(np.zeros((2, 3), np.float32))


def test_an_optimizer_number_that_makes_no_sense(still_works: cs.CentralStorageStrategy) -> None:
    with still_works.scope():
        with refused(errors.InvalidArgumentError, "momentum", "[0, 1]", "1.5"):
            cs.optimizers.SGD(0.1, momentum=1.5)
        with refused(errors.InvalidArgumentError, "learning_rate", "nan"):
            cs.optimizers.Adam(float("nan"))


def test_a_plan_larger_than_memory_touches_nothing(still_works: cs.CentralStorageStrategy) -> None:
    server = psutil.Process(still_works.statistics().pid)
    before = server.memory_full_info().pss, psutil.Process().memory_full_info().pss
    elements = 1 << 42
    with still_works.scope(), refused(errors.MemoryPlanError, "huge", "bytes planned", "bytes available"):
        cs.Variable(np.broadcast_to(np.float32(0), (elements,)), name="huge")
    after = server.memory_full_info().pss, psutil.Process().memory_full_info().pss
    assert all(now - then < 64 << 20 for now, then in zip(after, before, strict=True))


@pytest.mark.parametrize("where", ["merge", "scope", "nested run"])
def test_a_call_in_the_wrong_place(still_works: cs.CentralStorageStrategy, where: str) -> None:
    def inside() -> None:
        if where == "scope":
            with still_works.scope():
                pass
        elif where == "nested run":
            still_works.run(replica)
        else:
            cs.get_replica_context().merge_call(lambda strategy: cs.get_replica_context().merge_call(print))

    kind = AttributeError if where == "merge" else errors.ContextError  # there is no replica context in a merge_fn
    with refused(kind):
        still_works.run(inside)
