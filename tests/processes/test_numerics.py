"""Gradients that are not finite: what ``check_numerics`` finds, and what it keeps from the variables."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.captured import nearly_all_captured
from tests.harness.processes import run
from tests.harness.replicas import replica
from tests.harness.services import connected
from tests.harness.stand_in_gpus import stand_in_gpus

import central_storage as cs
from central_storage.core.random_streams import function_name
from central_storage.errors import NumericsError

F32 = np.float32
NAN, INF = np.nan, np.inf
LARGE = 3e38  # finite, but not twice that


class Training:
    """A dense variable, one in a slab with it, a table, and a metric; what a step brings is said by its argument."""

    def __init__(self, strategy: cs.CentralStorageStrategy, into_buffers: bool = False) -> None:
        self.strategy = strategy
        with strategy.scope():
            w = cs.Variable(np.ones((3, 5), F32), name="w")
            b = cs.Variable(np.ones(2, F32), name="b")
            table = cs.Variable(np.ones((9, 2), F32), name="table", sparse=True)
            self.optimizer = optimizer = cs.optimizers.Adam(0.5)
            self.losses = losses = cs.metrics.Sum()
        self.variables = (w, b, table)

        @cs.function
        def step(where: int, value: float) -> None:
            """Replica ``where`` brings ``value`` in a dense gradient, or replica ``where - 10`` in a sparse one."""
            losses.update_state(1.0)
            gradients = cs.gradient_buffers([w, b]) if into_buffers else [np.empty((3, 5), F32), np.empty(2, F32)]
            for gradient in gradients:
                gradient[...] = 1
            rows = np.ones((3, 2), F32)
            if where == replica():
                gradients[0][1, 4] = value
            if where == replica() + 10:
                rows[2, 1] = value
            pairs: list[Any] = list(zip(gradients, (w, b), strict=True))
            if not into_buffers:
                pairs.append((cs.IndexedSlices(rows, np.array([4, 0, 7])), table))
            optimizer.apply_gradients(pairs)

        self.step = step

    def run(self, where: int = -1, value: float = 1.0) -> None:
        self.strategy.run(self.step, args=(where, value))

    def steps(self) -> int:
        """How many runs of functions of this name have begun."""
        return self.strategy.controller.steps().get(function_name(self.step), 0)

    def state(self) -> list[Any]:
        """All that a step changes."""
        slots = [self.optimizer.get_slot(v, slot) for v in self.variables[:2] for slot in self.optimizer.slot_names]
        values = [np.array(each) for each in (*self.variables, *slots)]
        return [*values, int(self.optimizer.iterations), float(self.losses.result())]


def equal(one: list[Any], other: list[Any]) -> bool:
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def raising() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], check_numerics="raise") as strategy:
        yield connected(strategy, nested=True)


@pytest.fixture(scope="module")
def in_threads() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], check_numerics="raise", in_process=True) as strategy:
        yield connected(strategy, nested=True)


@pytest.fixture(scope="module", params=["processes", "threads"])
def either(request: pytest.FixtureRequest) -> cs.CentralStorageStrategy:
    name = "raising" if request.param == "processes" else "in_threads"
    return request.getfixturevalue(name)  # type: ignore[no-any-return]


@pytest.mark.parametrize("into_buffers", [False, True])
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("value", [NAN, -INF, LARGE])
def test_nothing_of_a_bad_step_is_applied_and_the_next_one_works(
    either: cs.CentralStorageStrategy, into_buffers: bool, bad: int, value: float
) -> None:
    training, truth = Training(either, into_buffers), Training(either, into_buffers)
    for number in range(5):
        before = training.state()
        if number in (0, 3):  # before the server knows the set, and in the midst
            what = re.escape(f"has {float(F32(value))!r} at [1, 4]")
            with pytest.raises(
                NumericsError, match=rf"gradient of 'w(_\d+)?' {what}.* in step {training.steps()} of .*step"
            ) as e:
                training.run(bad, value)
            assert f"on replica {bad} " in str(e.value)
            assert ("replicas may exceed the largest float32" in str(e.value)) == (value == LARGE)
            assert isinstance(e.value, FloatingPointError)
            if number:
                assert equal(training.state(), before)
        training.run()
        truth.run()
    assert equal(training.state(), truth.state())


@pytest.mark.parametrize("value", [NAN, INF, LARGE])
def test_a_sparse_gradient_is_named_by_the_row_of_the_table(either: cs.CentralStorageStrategy, value: float) -> None:
    training = Training(either)
    training.run()
    before = training.state()
    with pytest.raises(NumericsError, match=r"gradient of 'table(_\d+)?' has .* at \[7, 1\].* on replica 1 "):
        training.run(11, value)
    assert equal(training.state(), before)


def test_the_sum_of_rows_that_are_named_twice_may_not_overflow(raising: cs.CentralStorageStrategy) -> None:
    with raising.scope():
        table, sgd = cs.Variable(np.zeros((9, 2), F32), name="table"), cs.optimizers.SGD(1e-38)

    def step(value: float) -> None:
        slices = cs.IndexedSlices(np.full((4, 2), value, F32), np.array([5, 5, 5, 5]))
        sgd.apply_gradients([(slices, table)])

    with pytest.raises(NumericsError, match=r"has .* at \[5, 0\], so the sum"):
        raising.run(step, args=(1e38,))
    raising.run(step, args=(4e37,))
    assert np.isfinite(table.numpy()).all()


def test_large_numbers_whose_sum_is_finite_are_applied(raising: cs.CentralStorageStrategy) -> None:
    with raising.scope():
        w, sgd = cs.Variable(np.zeros(4, F32)), cs.optimizers.SGD(1e-38)
    for _ in range(4):
        raising.run(lambda: sgd.apply_gradients([(np.full(4, 1.6e38, F32), w)]))
    assert np.allclose(w, -4 * 3.2)


def test_captured_steps_and_steps_by_a_program_are_looked_at(raising: cs.CentralStorageStrategy) -> None:
    training = Training(raising, into_buffers=True)
    for _ in range(3):
        with nearly_all_captured(raising, 200):
            for _ in range(200):
                training.run()
        before = training.state()
        with pytest.raises(NumericsError):
            training.run(1, INF)
        assert equal(training.state(), before)


def test_steps_that_are_sent_ahead_end_with_the_bad_one(raising: cs.CentralStorageStrategy) -> None:
    training = Training(raising, into_buffers=True)
    truth = Training(raising, into_buffers=True)
    elements = [np.full(2, where) for where in [-1] * 4 + [1] + [-1] * 5]
    wheres = iter(raising.experimental_distribute_dataset(elements))
    with pytest.raises(NumericsError, match=r"has nan at \[1, 4\]"):
        for _ in raising.run_steps(lambda where: training.step(int(where[0]), NAN), wheres):
            pass
    assert len(list(wheres)) == 5  # those that never began went back
    for _ in range(4):
        truth.run()
    assert equal(training.state(), truth.state())


def test_a_replica_whose_weight_is_0_may_bring_anything(raising: cs.CentralStorageStrategy) -> None:
    with raising.scope():
        w, sgd = cs.Variable(np.zeros(4, F32)), cs.optimizers.SGD(1.0)

    def step(weight: float) -> None:
        gradient = np.full(4, NAN if replica() else 1, F32)
        cs.optimizers.apply_gradients([(sgd, [(gradient, w)])], weight=weight if replica() else 1)

    raising.run(step, args=(0,))
    assert w.numpy().tolist() == [-1] * 4
    with pytest.raises(NumericsError, match=r"has nan .* on replica 1"):
        raising.run(step, args=(1e-3,))


def test_a_run_in_a_merge_call_is_looked_at(raising: cs.CentralStorageStrategy) -> None:
    training = Training(raising)
    training.run()
    before = training.state()

    def outer() -> None:
        cs.get_replica_context().merge_call(lambda strategy: strategy.run(training.step, args=(1, NAN)))  # type: ignore[union-attr]

    with pytest.raises(NumericsError, match=r"has nan at \[1, 4\].* on replica 1"):
        raising.run(outer)
    assert equal(training.state(), before)


@pytest.mark.parametrize("dtype", ["float16", "float64", "complex64"])
def test_variables_of_other_dtypes_are_looked_at(raising: cs.CentralStorageStrategy, dtype: str) -> None:
    with raising.scope():
        w, sgd = cs.Variable(np.ones((2, 3), dtype)), cs.optimizers.SGD(0.5)

    def step(value: Any) -> None:
        gradient = np.ones((2, 3), dtype)
        gradient[1, 0] = value
        sgd.apply_gradients([(gradient, w)])

    raising.run(step, args=(1,))
    with pytest.raises(NumericsError, match=r"inf.* at \[1, 0\]"):
        raising.run(step, args=(INF,))
    assert np.array_equal(w, np.zeros((2, 3)))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
def test_gradients_that_are_looked_at_while_they_are_copied(either: cs.CentralStorageStrategy, dtype: str) -> None:
    """A large one beside a small one, which is looked at later, and one that lies in its place."""
    count = 200_000
    with either.scope():
        large, small, placed = (cs.Variable(np.ones(each, dtype), name="g") for each in (count, 3, 50))
        sgd = cs.optimizers.SGD(0.5)

    @cs.function
    def step(bad: tuple[tuple[int, int], ...], value: float) -> None:
        [in_place] = cs.gradient_buffers([placed])
        in_place[...] = 1
        gradients = [np.ones(count, dtype), np.ones(3, dtype), in_place]
        if replica() == 1:
            for which, index in bad:
                gradients[which][index] = value
        sgd.apply_gradients(list(zip(gradients, (large, small, placed), strict=True)))

    names = [re.escape(repr(each.name)) for each in (large, small, placed)]
    either.run(step, args=((), 0))
    edge = (1 << 18) // np.dtype(dtype).itemsize
    cases: list[tuple[tuple[int, int], ...]] = [((0, each),) for each in (0, edge - 1, edge, count - 1)]
    cases += [((1, 2),), ((2, 7),), ((0, count - 1), (1, 0)), ((1, 2), (2, 7)), ((0, 5), (0, edge + 5), (2, 0))]
    for bad in cases:
        which, index = bad[0]
        with pytest.raises(NumericsError, match=rf"gradient of {names[which]} has .*inf.* at \[{index}\].* replica 1"):
            either.run(step, args=(bad, INF))
    either.run(step, args=((), 0))
    for variable in (large, small, placed):
        assert np.array_equal(variable, np.full(variable.shape, -1))


def test_each_update_of_a_run_is_looked_at(raising: cs.CentralStorageStrategy) -> None:
    with raising.scope():
        large, sgd = cs.Variable(np.ones(200_000, F32), name="large"), cs.optimizers.SGD(0.5)

    @cs.function
    def step(last: float) -> None:
        for value in (1, last):
            sgd.apply_gradients([(np.full(200_000, value, F32), large)])

    with pytest.raises(NumericsError, match=r"has nan at \[0\]"):
        raising.run(step, args=(NAN,))
    assert np.array_equal(large, np.ones(200_000))
    raising.run(step, args=(0.5,))
    assert np.array_equal(large, np.full(200_000, -0.5))


@pytest.mark.parametrize("how", ["zmq", "threads", "processes"])
def test_warnings_are_printed_once_for_a_variable_and_then_counted(
    how: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    if how == "zmq":
        monkeypatch.setenv("CS_MAILBOXES", "off")
    monkeypatch.setenv("CS_CHECK_NUMERICS", "warn")
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=how == "threads") as strategy:
        training = Training(strategy)
        training.run()
        for _ in range(12):
            training.run(0, NAN)
        training.run(11, INF)
        assert int(training.optimizer.iterations) == 14
        assert np.isnan(training.variables[0].numpy()[1, 4])
        counters = strategy.statistics()
        assert [each.not_finite for each in counters.replicas] == [12, 0]  # rows are the workers' own affair
        assert counters.overflowed == 0
    lines = (
        caplog.messages if how == "threads" else capfd.readouterr().err.splitlines()
    )  # pytest takes those of threads
    said = [line for line in lines if "the gradient of" in line]
    assert len(said) == 3
    assert "'w' has nan at [1, 4], in step 1 of" in said[0]
    assert "on replica 0 " in said[0]
    assert "'w' has nan at [1, 4], in step 10 of" in said[1]
    assert "so it was 10 times" in said[1]
    assert "'table' has inf at [7, 1], in step 13 of" in said[2]
    assert "on replica 1 " in said[2]
    assert all(line.endswith("; the update is not held back") for line in said)


def test_a_sum_that_overflows_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], check_numerics="warn") as strategy:
        with strategy.scope():
            w, h = cs.Variable(np.zeros((2, 3), F32), name="w"), cs.Variable(np.zeros(4, np.float16), name="h")
            sgd, bounded = cs.optimizers.SGD(1.0), cs.optimizers.SGD(1.0, clipvalue=0.5)

        def step(single: float, half: float) -> None:
            gradients = np.ones((2, 3), F32), np.ones(4, np.float16)
            gradients[0][1, 1], gradients[1][2] = single, half
            sgd.apply_gradients([(gradients[0], w)])
            bounded.apply_gradients([(gradients[1], h)])

        for single, half in ((1, 1), (LARGE, 1), (1, 4e4), (1, 1)):
            strategy.run(step, args=(single, half))
        counters = strategy.statistics()
        assert (counters.not_finite, counters.overflowed) == (2, 2)
        assert [each.not_finite for each in counters.replicas] == [0, 0]
    said = [line for line in capfd.readouterr().err.splitlines() if "the sum of the gradients of" in line]
    assert len(said) == 2
    assert "'w' overflows: it has inf at [1, 1], and each is finite, in step 1 of" in said[0]
    assert "'h' overflows: it has inf at [2], and each is finite, in step 2 of" in said[1]


@pytest.mark.parametrize("ahead", [False, True])
def test_warnings_leave_steps_to_the_program_and_change_no_bit(ahead: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], check_numerics="warn") as strategy:
        watched, plain = Training(strategy, into_buffers=True), Training(strategy, into_buffers=True)
        wheres = [where for _ in range(4) for where in [-1] * 40 + [1, 0]]

        def train(training: Training) -> None:
            if ahead:
                data = strategy.experimental_distribute_dataset([np.full(2, where) for where in wheres])
                assert len(list(strategy.run_steps(lambda where: training.step(int(where[0]), NAN), data))) == 168
            else:
                for where in wheres:
                    training.run(where, NAN)

        with nearly_all_captured(strategy, 165):
            train(watched)
        assert [each.not_finite for each in strategy.statistics().replicas] == [4, 4]
        strategy.controller.check_numerics = "off"  # type: ignore[attr-defined]
        train(plain)
        counters = strategy.statistics()
        assert counters.not_finite == 16
        assert [each.not_finite for each in counters.replicas] == [4, 4]
        assert equal(watched.state(), plain.state())
    said = [line for line in capfd.readouterr().err.splitlines() if "the gradient of" in line]
    assert [re.findall(r"in step \d+ of|on replica \d", line) for line in said] == [
        ["in step 40 of", "on replica 1"],
        ["in step 41 of", "on replica 0"],
    ]


@pytest.mark.parametrize("into_buffers", [False, True])
def test_a_server_that_is_killed_after_its_look_looks_again(
    into_buffers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CS_FAILPOINTS", "server.looked=kill@1")
    monkeypatch.setenv("CS_FAILPOINTS_DIR", str(tmp_path))
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], check_numerics="warn") as strategy:
        training, truth = Training(strategy, into_buffers), Training(strategy, into_buffers)
        for where in (-1, -1, -1, -1, 1, -1):
            training.run(where, NAN)
        assert len(list(tmp_path.iterdir())) == 1  # the server has died
        assert strategy.statistics().not_finite == 1  # since the start of this server
        for where in (-1, -1, -1, -1, 1, -1):
            truth.run(where, NAN)
        assert equal(training.state(), truth.state())
    said = [line for line in capfd.readouterr().err.splitlines() if "the gradient of 'w' has nan" in line]
    assert len(said) == 2
    assert "in step 4 of" in said[0]
    assert "has nan at [1, 4] on replica 1 " in said[1]


def test_many_variables_make_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with cs.CentralStorageStrategy(["cpu:0"], check_numerics="warn") as strategy:
        with strategy.scope():
            variables = [cs.Variable(np.zeros(3, F32), name=f"v{number}") for number in range(7)]
            sgd = cs.optimizers.SGD(1.0)

        def step() -> None:
            sgd.apply_gradients([(np.full(3, NAN, F32), variable) for variable in variables])

        for _ in range(3):
            strategy.run(step)
    [said] = [line for line in capfd.readouterr().err.splitlines() if "the gradient of" in line]
    assert "'v0' has nan at [0]" in said
    assert "; so are those of 6 more variables; the update is not held back" in said


def test_what_lies_between_variables_disturbs_nobody(raising: cs.CentralStorageStrategy) -> None:
    """A freed variable leaves its gradients where smaller ones come to lie."""
    with raising.scope():
        old, sgd = cs.Variable(np.zeros(64, F32), name="old"), cs.optimizers.SGD(1.0)

    def leave(old: Any, sgd: Any) -> None:
        [gradient] = cs.gradient_buffers([old])
        gradient[:] = NAN
        sgd.apply_gradients([(gradient, old)])

    with pytest.raises(NumericsError):
        raising.run(leave, args=(old, sgd))
    del old
    with raising.scope():
        new = [cs.Variable(np.zeros(5, F32), name=f"new{number}") for number in range(4)]

    def step() -> None:
        gradients = cs.gradient_buffers(new)
        for gradient in gradients:
            gradient[:] = 1
        sgd.apply_gradients(zip(gradients, new, strict=True))

    for number in range(1, 5):
        raising.run(step)
        assert all(np.array_equal(each, np.full(5, -2.0 * number)) for each in new)


def test_it_is_off_unless_somebody_asks(two: cs.CentralStorageStrategy) -> None:
    training = Training(two)
    training.run(0, NAN)
    assert np.isnan(training.variables[0].numpy()[1, 4])


def test_a_value_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("Raise", True, 1, "", ["raise"]):
        with pytest.raises(cs.errors.ConfigurationError, match="check_numerics must be one of 'off', 'warn', 'raise'"):
            cs.CentralStorageStrategy(["cpu:0"], check_numerics=value)  # type: ignore[arg-type]
    monkeypatch.setenv("CS_CHECK_NUMERICS", "yes")
    with pytest.raises(cs.errors.ConfigurationError, match=r"CS_CHECK_NUMERICS must be one of .*, not 'yes'"):
        cs.CentralStorageStrategy(["cpu:0"])


SCRIPT = """
import numpy as np
import central_storage as cs

with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], check_numerics="off") as strategy:
    with strategy.scope():
        w, sgd = cs.Variable(np.zeros(2, np.float32), name="w"), cs.optimizers.SGD(1.0)

    def step(value):
        sgd.apply_gradients([(np.float32([1, value]), w)])

    for value in (1, np.inf, 1):
        try:
            strategy.run(step, args=(value,))
        except cs.errors.NumericsError:
            print("skipped")
    print(w.numpy())
"""


@pytest.mark.parametrize(
    ("options", "lines"), [(["--check-numerics", "raise"], ["skipped", "[-4. -4.]"]), ([], ["[ -6. -inf]"])]
)
def test_the_option_of_the_launcher_counts(options: list[str], lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launched = run("cs-launch", "--devices", "cpu:0,cpu:1", *options, "train.py", directory=tmp_path).ok()
    assert launched.lines == lines


IN_FRAMES = """
import numpy as np
import central_storage as cs

with cs.CentralStorageStrategy() as strategy:
    with strategy.scope():
        w = cs.Variable(np.zeros((3, 5), np.float32), name="w")
        table = cs.Variable(np.zeros((9, 2), np.float32), name="table", sparse=True)
        adam = cs.optimizers.Adam(0.5)

    def step(in_buffers, dense, sparse):
        [gradient] = cs.gradient_buffers([w]) if in_buffers else [np.empty((3, 5), np.float32)]
        gradient[...] = 1
        rows = np.ones((2, 2), np.float32)
        if cs.get_replica_context().replica_id_in_sync_group:
            gradient[1, 4], rows[1, 0] = dense, sparse
        adam.apply_gradients([(gradient, w), (cs.IndexedSlices(rows, np.array([4, 7])), table)])

    for in_buffers in (False, True):
        for dense, sparse in ((np.nan, 1), (1, np.inf), (1, 1)):
            before = w.numpy(), table.numpy(), adam.iterations
            try:
                strategy.run(step, args=(in_buffers, dense, sparse))
            except cs.errors.NumericsError as error:
                print(str(error).partition(",")[0])
                assert all(map(np.array_equal, before, (w.numpy(), table.numpy(), adam.iterations)))
    assert np.isfinite(w.numpy()).all() and np.isfinite(table.numpy()).all()
    print(adam.iterations)
"""


def test_gradients_that_travel_in_frames_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(IN_FRAMES)
    options = ("--memory", "frames", "--devices", "cpu:0,cpu:1", "--check-numerics", "raise")
    ended = run("cs-launch", *options, "train.py", directory=tmp_path).ok()
    named = ["the gradient of 'w' has nan at [1", "the gradient of 'table' has inf at [7"]
    assert ended.lines == [*named, *named, "2"]


@pytest.mark.parametrize(
    ("place", "bad", "check"),
    [
        ("return", -1, "raise"),  # the dead worker has looked, and found nothing
        ("return", 1, "raise"),  # it has found a bad number, and nobody knows
        ("return", 0, "raise"),  # the other one has found it
        ("returned", 1, "raise"),
        ("returned", 1, "warn"),  # the update is there, and nobody has looked
    ],
)
def test_a_worker_that_dies_after_its_look_looks_again(
    place: str, bad: int, check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CS_FAILPOINTS", f"worker.{place}[1]=kill@2")
    monkeypatch.setenv("CS_FAILPOINTS_DIR", str(tmp_path))
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], check_numerics=check) as strategy:  # type: ignore[arg-type]
        training, truth = Training(strategy), Training(strategy)
        training.run()
        before = training.state()
        if bad >= 0 and check == "raise":
            with pytest.raises(NumericsError, match=rf"has nan at \[1, 4\].* on replica {bad} "):
                training.run(bad, NAN)
            assert equal(training.state(), before)
        else:
            training.run(bad, NAN)
        training.run()
        assert len(list(tmp_path.iterdir())) == 1  # the worker has died
        truth.run()
        if bad < 0 or check == "warn":
            truth.run(bad, NAN)
        truth.run()
        assert equal(training.state(), truth.state())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the kernels of a stand-in are compiled by gcc")
@pytest.mark.parametrize("parameter_device", ["cpu:0", "gpu:0"])
def test_gradients_on_gpus_are_looked_at_there(parameter_device: str) -> None:
    with (
        stand_in_gpus(2),
        cs.CentralStorageStrategy(["gpu:0", "gpu:1"], parameter_device, check_numerics="raise") as strategy,
    ):
        with strategy.scope():
            w = cs.Variable(np.ones((3, 4), F32), name="w")
            table, sgd = cs.Variable(np.ones((9, 2), F32), name="table"), cs.optimizers.SGD(0.5)

        def step(into_buffers: bool, dense: float, sparse: float) -> int:
            xp = cs.get_array_module()
            before = xp.counts()["device_to_host_nbytes"]  # type: ignore[attr-defined]
            gradient = cs.gradient_buffers([w])[0] if into_buffers else xp.empty((3, 4), F32)
            gradient[...] = xp.asarray(np.where(np.arange(12).reshape(3, 4) == 6, dense, 1).astype(F32))
            rows = cs.IndexedSlices(xp.asarray(F32([[1, 1], [1, sparse]])), np.array([5, 8]))
            sgd.apply_gradients([(gradient, w), (rows, table)])
            return int(xp.counts()["device_to_host_nbytes"] - before)  # type: ignore[attr-defined]

        for into_buffers in (False, True):
            strategy.run(step, args=(into_buffers, 1.0, 1.0))
            before = w.numpy(), table.numpy(), sgd.iterations
            with pytest.raises(NumericsError, match=r"'w' has nan at \[1, 2\]"):
                strategy.run(step, args=(into_buffers, NAN, INF))
            with pytest.raises(NumericsError, match=r"'w' has .*e\+38 at \[1, 2\], so the sum"):
                strategy.run(step, args=(into_buffers, LARGE, 1.0))
            with pytest.raises(NumericsError, match=r"'table' has -inf at \[8, 1\]"):
                strategy.run(step, args=(into_buffers, 1.0, -INF))
            assert equal([w.numpy(), table.numpy(), sgd.iterations], list(before))
        strategy.run(step, args=(True, 1.0, 1.0))
        assert w.numpy()[1, 2] == 1 - 3


def test_what_numpy_does_about_errors_stays_as_the_function_has_left_it() -> None:
    with cs.CentralStorageStrategy(["cpu:0"], check_numerics="raise") as strategy:
        with strategy.scope():
            w = cs.Variable(np.ones(3, F32))
            optimizer = cs.optimizers.SGD(0.5)

        def step(value: float) -> dict[str, str]:
            with np.errstate(all="raise"):
                optimizer.apply_gradients([(np.full(3, value, F32), w)])
            return dict(np.geterr())

        before = strategy.run(step, args=(1.0,))
        with pytest.raises(NumericsError):
            strategy.run(step, args=(NAN,))
        assert strategy.run(step, args=(1.0,)) == before == dict(np.geterr())
