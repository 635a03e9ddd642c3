"""Observers as coroutines: many at once while a training runs, cancelled, late, and left alone by their service."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.harness.processes import start
from tests.harness.timing import unit

import central_storage as cs
from central_storage import errors
from central_storage.ctl.asking import Supervisor

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def watched(two: cs.CentralStorageStrategy) -> cs.Variable:
    with two.scope():
        return cs.Variable(np.zeros(5_000), name="watched", aggregation=cs.VariableAggregation.SUM)


async def test_questions(two: cs.CentralStorageStrategy, watched: cs.Variable) -> None:
    watched.assign(np.full(5_000, 7.0))
    async with cs.aio.connect(two.address) as observer:
        value, records, counters = await asyncio.gather(
            observer.get("watched"), observer.variables(), observer.statistics()
        )
        assert (set(value), value.dtype) == ({7.0}, np.float64)
        assert {record.spec.name for record in records} >= {"watched"}
        assert counters.commits == two.statistics().commits
        assert observer.replicas == 2
        with pytest.raises(errors.InvalidArgumentError, match="no_such_variable"):
            await observer.get("no_such_variable")
        assert [set(value) for value in await observer.get_all(["watched", "watched"])] == [{7.0}] * 2
        assert set(await observer.get("watched")) == {7.0}  # an error leaves it usable
    with pytest.raises(errors.ShutdownError, match="closed"):
        await observer.get("watched")
    await observer.close()


async def test_awaited_rather_than_entered(
    two: cs.CentralStorageStrategy, watched: cs.Variable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CS_ADDRESS", two.address)
    observer = await cs.aio.connect()
    assert await observer.variables() != ()
    await observer.close()


async def test_fifty_observers_while_a_training_runs(two: cs.CentralStorageStrategy, watched: cs.Variable) -> None:
    watched.assign(np.zeros(5_000))

    @cs.function
    def step() -> None:
        watched.assign_add(np.full(5_000, 0.5))

    async def watch(ready: asyncio.Barrier) -> list[float]:
        seen = []
        async with cs.aio.connect(two.address, timeout=unit(30)) as observer:
            await ready.wait()
            while not seen or seen[-1] < 50:
                value = await observer.get("watched")
                assert value.min() == value.max()  # of one commit
                seen.append(float(value[0]))
        return seen

    def train() -> None:
        for _ in range(50):
            two.run(step)

    ready = asyncio.Barrier(51)
    async with asyncio.TaskGroup() as group:
        watchers = [group.create_task(watch(ready)) for _ in range(50)]
        await ready.wait()
        await asyncio.to_thread(train)
    for watcher in watchers:
        seen = watcher.result()
        assert seen == sorted(seen)
        assert seen[-1] == 50.0


async def test_a_cancelled_question_leaves_the_observer_usable(
    two: cs.CentralStorageStrategy, watched: cs.Variable
) -> None:
    async with cs.aio.connect(two.address) as observer:
        for _ in range(20):
            question = asyncio.create_task(observer.get("watched"))
            await asyncio.sleep(0)  # it has been sent, and waits
            question.cancel()
            with pytest.raises(asyncio.CancelledError):
                await question
        assert (await observer.statistics()).variables == two.statistics().variables
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_server_that_does_not_answer(own: cs.CentralStorageStrategy) -> None:
    server = psutil.Process(own.statistics().pid)
    observer = await cs.aio.connect(own.address, timeout=0.3)
    server.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(errors.NoAnswerError, match=r"did not answer within 0\.3 s") as caught:
            await observer.statistics()
        assert isinstance(caught.value, TimeoutError)
        with pytest.raises(errors.NoAnswerError, match="did not answer"):
            await cs.aio.connect(own.address, timeout=0.3)
        with pytest.raises(errors.NoAnswerError, match="did not answer"):
            cs.connect(own.address, timeout=0.3)
        connecting = asyncio.create_task(_enter(own.address))
        await asyncio.sleep(0)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
    finally:
        server.send_signal(signal.SIGCONT)
    assert (await observer.statistics()).pid == server.pid  # the late answer to the question before is not taken
    await observer.close()


async def _enter(address: str) -> None:
    async with cs.aio.connect(address):
        pytest.fail("nobody answers")


SERVES = """
import json
import central_storage as cs

strategy = cs.CentralStorageStrategy(["cpu:0"])
print(json.dumps([strategy.address, strategy.statistics().pid]), flush=True)
strategy.run(lambda: __import__("signal").pause())
"""


async def test_the_service_ends_while_a_question_waits() -> None:
    with start("-c", SERVES) as child:
        address, server = json.loads(child.wait_for(r"^\[.*\]$").group())
        observer = await cs.aio.connect(address, timeout=unit(60))
        blocking = cs.connect(address, timeout=unit(60))
        os.kill(server, signal.SIGSTOP)
        questions = [
            asyncio.create_task(observer.statistics()),
            asyncio.create_task(asyncio.to_thread(blocking.statistics)),
        ]
        await asyncio.sleep(0)
        child.signal(signal.SIGKILL)
        for question in questions:
            with pytest.raises(errors.ShutdownError, match="has ended"):
                await question
        with pytest.raises(errors.ShutdownError, match="has ended"):
            await observer.get("w")
        await observer.close()
        blocking.close()


async def test_a_question_of_an_observer_that_is_closed_meanwhile(own: cs.CentralStorageStrategy) -> None:
    server = psutil.Process(own.statistics().pid)
    observer = await cs.aio.connect(own.address)
    server.send_signal(signal.SIGSTOP)
    try:
        question = asyncio.create_task(observer.statistics())
        await asyncio.sleep(0)
        await observer.close()
        with pytest.raises(errors.ShutdownError, match="closed"):
            await question
    finally:
        server.send_signal(signal.SIGCONT)


async def test_no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CS_ADDRESS", raising=False)
    with pytest.raises(errors.ConfigurationError, match="CS_ADDRESS"):
        await cs.aio.connect()
    with pytest.raises(errors.LaunchError, match="no service answers"):
        await cs.aio.connect(str(tmp_path))
    with pytest.raises(errors.ConfigurationError, match="timeout"):
        await cs.aio.connect(str(tmp_path), timeout=0)


async def test_a_supervisor_that_is_stopped_stops_no_other_task() -> None:
    with cs.CentralStorageStrategy() as strategy:
        with Supervisor(strategy.address, unit(20)) as supervisor:
            pid = supervisor.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            given_up, connecting = (
                asyncio.ensure_future(cs.aio.connect(strategy.address, timeout=unit(10))) for _ in range(2)
            )
            for _ in range(3):
                await asyncio.sleep(0)
            assert not connecting.done()
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
        finally:
            os.kill(pid, signal.SIGCONT)
        observer = await connecting
        assert observer.replicas == 1
        await observer.close()
