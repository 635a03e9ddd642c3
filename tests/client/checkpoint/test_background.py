"""Checkpoints that a thread writes, and when a manager saves by itself."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import central_storage as cs
from central_storage import errors
from central_storage.checkpoint import checkpoint as checkpoints
from central_storage.checkpoint import disk
from central_storage.checkpoint.failures import Policy
from central_storage.train import Checkpoint, CheckpointManager, CheckpointOptions

IN_THREAD = CheckpointOptions(enable_async=True)


class Gate:
    """Holds threads that write until it is opened, and lets them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.error: Exception | None = None
        for name in ("add", "replace"):
            monkeypatch.setattr(checkpoints, name, self._held(getattr(checkpoints, name)))

    def _held(self, write: Any) -> Any:
        def held(*arguments: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(60)
            if self.error is not None:
                raise self.error
            return write(*arguments)

        return held


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def test_the_values_are_those_of_the_save(tmp_path: Path, gate: Gate) -> None:
    w = cs.Variable([1.0, 2.0])
    checkpoint = Checkpoint(w=w)
    path = checkpoint.save(tmp_path / "ckpt", options=IN_THREAD)
    assert gate.reached.wait(60)
    assert (not Path(path).exists(), int(checkpoint.save_counter)) == (True, 1)
    w.assign([5.0, 5.0])
    gate.opened.set()
    checkpoint.sync()
    checkpoint.restore(path).assert_consumed()
    assert (w.numpy().tolist(), int(checkpoint.save_counter)) == ([1, 2], 1)
    assert checkpoint.write(tmp_path / "plain", options=IN_THREAD) == str(tmp_path / "plain.safetensors")
    checkpoint.read(tmp_path / "plain").assert_consumed()  # waits for the thread


def test_an_error_of_the_thread_is_logged_and_raised_once(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = Checkpoint(w=cs.Variable(1.0))
    gate.error = errors.CheckpointSaveError(errno.ENOSPC, "no room")
    gate.opened.set()
    checkpoint.save(tmp_path / "ckpt", options=IN_THREAD)
    with pytest.raises(OSError, match="no room"):
        checkpoint.save(tmp_path / "ckpt")
    assert "ckpt-1.safetensors could not be saved" in caplog.text
    checkpoint.sync()
    gate.error = None
    assert checkpoint.save(tmp_path / "ckpt") == str(tmp_path / "ckpt-1.safetensors")  # the number was not used


def test_a_second_save_waits_for_the_first(tmp_path: Path, gate: Gate) -> None:
    manager = CheckpointManager(Checkpoint(w=cs.Variable(1.0)), tmp_path, max_to_keep=2)
    first = manager.save(options=IN_THREAD)
    assert gate.reached.wait(60)
    threading.Timer(0.05, gate.opened.set).start()
    second = manager.save(options=IN_THREAD)  # returns when the first is there
    assert manager.checkpoints[:1] == [first]
    manager.sync()
    assert manager.checkpoints == [first, second]


def test_a_relative_path_stays_where_it_was(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    checkpoint = Checkpoint(w=cs.Variable(1.0))
    manager = CheckpointManager(Checkpoint(w=cs.Variable(2.0)), "managed", 1)
    begun = [manager.save(options=IN_THREAD), checkpoint.save("counted", options=IN_THREAD)]
    monkeypatch.chdir(tmp_path / "second")
    gate.opened.set()
    manager.sync()
    checkpoint.sync()
    assert begun == ["managed/ckpt-1.safetensors", "counted-1.safetensors"]
    saved = manager.save()
    monkeypatch.chdir(tmp_path / "first")
    checkpoint.write("written", options=IN_THREAD)
    monkeypatch.chdir(tmp_path / "second")
    checkpoint.sync()
    assert (manager.directory, manager.checkpoints) == ("managed", [saved])
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*.safetensors"))] == [
        "first/counted-1.safetensors",
        "first/managed/ckpt-2.safetensors",
        "first/written.safetensors",
    ]


def test_options_are_checked(tmp_path: Path) -> None:
    checkpoint = Checkpoint(w=cs.Variable(1.0))
    with pytest.raises(errors.InvalidArgumentError, match="options must be"):
        checkpoint.save(tmp_path / "ckpt", options=True)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgumentError, match="sync"):
        CheckpointOptions(experimental_write_callbacks=[print])  # type: ignore[arg-type]
    assert CheckpointOptions(experimental_enable_async_checkpoint=True).enable_async
    with pytest.raises(errors.InvalidArgumentError, match="checkpoint must be"):
        CheckpointManager(cs.Variable(1.0), tmp_path, 1)  # type: ignore[arg-type]
    wrong = [{"every_steps": 0}, {"every_seconds": 0.0}, {"every_seconds": "1"}, {"every_steps": True}]
    for arguments in wrong:
        with pytest.raises(errors.InvalidArgumentError, match=next(iter(arguments))):
            CheckpointManager(checkpoint, tmp_path, 1, **{"every_steps": 1, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [None, IN_THREAD], ids=["at once", "in a thread"])
def test_older_checkpoints_stay_if_the_new_one_is_damaged(
    tmp_path: Path, options: CheckpointOptions | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk returns another byte than was written, once the cache of the system is empty."""
    w = cs.Variable(np.zeros(1000, np.float32))
    manager = CheckpointManager(Checkpoint(w=w), tmp_path, max_to_keep=1)
    whole = manager.save()
    assert whole is not None

    def damage(file: int) -> None:
        path = next(iter(set(map(str, tmp_path.glob("*.safetensors"))) - {whole}))
        content = bytearray(Path(path).read_bytes())
        content[-1] ^= 1
        Path(path).write_bytes(content)

    with monkeypatch.context() as patched:
        patched.setattr(disk, "forget_cached", damage)
        with pytest.raises(errors.CheckpointSaveError, match=r"does not return .* checksum"):  # noqa: PT012  (either may)
            manager.save(options=options)
            manager.sync()
    assert whole in manager.checkpoints
    assert len(manager.skipped_checkpoints) == 1
    assert manager.restore_or_initialize() == whole
    last = manager.save()
    assert last in manager.checkpoints
    assert whole not in manager.checkpoints


@pytest.fixture(scope="module")
def strategy() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as made:
        made.run(lambda: None)  # from now on no connection is opened
        yield made


@pytest.fixture
def trained(strategy: cs.CentralStorageStrategy) -> tuple[Checkpoint, Any]:
    with strategy.scope():
        w, sgd = cs.Variable(np.zeros(4, np.float32)), cs.optimizers.SGD(1.0)

    def step(*element: Any) -> None:
        sgd.apply_gradients([(np.ones(4, np.float32), w)])

    return Checkpoint(w=w, sgd=sgd), step


def saved_steps(manager: CheckpointManager) -> list[int]:
    """After how many steps each checkpoint was saved; the variable and the count of the optimizer say the same."""
    found = []
    for path in manager.checkpoints:
        manager.checkpoint.restore(path).assert_consumed()
        steps = int(manager.checkpoint.sgd.iterations)
        assert manager.checkpoint.w.numpy().tolist() == [-steps] * 4
        found.append(steps)
    return found


def test_a_manager_saves_by_itself_every_so_many_steps(
    strategy: cs.CentralStorageStrategy, trained: tuple[Checkpoint, Any], tmp_path: Path
) -> None:
    checkpoint, step = trained
    manager = CheckpointManager(checkpoint, tmp_path, None, every_steps=3)
    for _ in range(7):
        strategy.run(step)
    manager.save()
    for _ in range(4):
        strategy.run(step)
    manager.sync()
    assert saved_steps(manager) == [3, 6, 7, 10]
    series = CheckpointManager(checkpoint, tmp_path / "series", None, every_steps=2)
    data = strategy.experimental_distribute_dataset(cs.data.Dataset.range(5).batch(1))
    before = int(checkpoint.sgd.iterations)
    for _ in strategy.run_steps(step, data, lookahead=0):
        pass
    series.sync()
    manager.sync()
    assert [steps - before for steps in saved_steps(series)] == [2, 4]


def test_a_manager_saves_by_itself_every_so_many_seconds(
    strategy: cs.CentralStorageStrategy,
    trained: tuple[Checkpoint, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from central_storage.checkpoint import automatic

    now = [100.0]
    monkeypatch.setattr(automatic.time, "monotonic", lambda: now[0])
    checkpoint, step = trained
    manager = CheckpointManager(checkpoint, tmp_path, None, every_seconds=10.0)
    for moment in (105.0, 110.0, 115.0, 121.0):
        now[0] = moment
        strategy.run(step)
    manager.sync()
    assert saved_steps(manager) == [2, 4]


@pytest.mark.parametrize("policy", ["raise", "continue", "stop"])
def test_an_error_of_the_thread_reaches_the_training_after_its_next_step(
    strategy: cs.CentralStorageStrategy,
    trained: tuple[Checkpoint, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: Policy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No further save is due then: the manager saves every 100 steps."""
    checkpoint, step = trained
    manager = CheckpointManager(checkpoint, tmp_path, None, every_steps=100, if_save_fails=policy)
    whole = manager.save()
    with monkeypatch.context() as full:
        full.setattr(disk, "write_at", refuse)
        manager.save(options=IN_THREAD)
        manager.checkpoint._writer.finish()
    with expected(policy):
        strategy.run(step)
    assert manager.failed_saves == 1
    assert manager.last_save_error is not None
    assert (manager.last_save_error.errno, manager.last_save_error.needed_nbytes) == (
        errno.ENOSPC,
        Path(str(whole)).stat().st_size,
    )
    assert ("the training goes on" in caplog.text) == (policy == "continue")
    assert [str(path) for path in tmp_path.iterdir()] == [whole]
    strategy.run(step)  # it is said once
    last = manager.save()
    assert manager.checkpoints == [whole, last]


@pytest.mark.parametrize("policy", ["raise", "continue", "stop"])
@pytest.mark.parametrize("by", ["save", "sync"])
def test_an_error_of_the_thread_reaches_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy, by: str
) -> None:
    w, steps = cs.Variable(1.0), cs.Variable(0)
    manager = CheckpointManager(
        Checkpoint(w=w), tmp_path, 1, if_save_fails=policy, step_counter=steps, checkpoint_interval=10
    )
    with monkeypatch.context() as full:
        full.setattr(disk, "write_at", refuse)
        manager.save(options=IN_THREAD)
        manager.checkpoint._writer.finish()
    found = None
    with expected(policy):
        found = getattr(manager, by)()
    assert manager.failed_saves == 1
    # The save that failed does not count: no ten steps must pass before the next one.
    found = found or manager.save()
    assert manager.checkpoints == [found] == [str(tmp_path / "ckpt-1.safetensors")]


@pytest.mark.parametrize("policy", ["raise", "continue", "stop"])
def test_a_directory_that_cannot_be_read_is_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    manager = CheckpointManager(Checkpoint(w=cs.Variable(1.0)), tmp_path, 1, if_save_fails=policy)
    monkeypatch.setattr(disk, "names", refuse)
    with expected(policy):
        assert manager.save(options=IN_THREAD) is None
    assert manager.failed_saves == 1


def refuse(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def expected(policy: Policy) -> AbstractContextManager[object]:
    """What the script gets."""
    if policy == "raise":
        return pytest.raises(errors.CheckpointSaveError, match="No space left on device; the checkpoint needs")
    return pytest.raises(SystemExit, match="6") if policy == "stop" else nullcontext()
