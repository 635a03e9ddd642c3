"""Notebooks and long-lived interpreters: cells that are run again, interrupts, restarts, tracebacks, completion."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable

import psutil
import pytest
from nbclient.exceptions import DeadKernelError
from tests.harness.notebooks import Kernel, notebook
from tests.harness.processes import ROOT, Ended, living_after, run
from tests.harness.timing import unit

PAGE = (ROOT / "docs/guide/notebooks.md").read_text()
STRATEGY = """
import os, signal
import numpy as np
import central_storage as cs

strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"])
"""
MODEL = """
with strategy.scope():
    w = cs.Variable(np.zeros(30_000, np.float32), name="w")
    b = cs.Variable(np.zeros(3, np.float32))
    optimizer = cs.optimizers.Adam(0.1)
"""
STEP = """
def step():
    optimizer.apply_gradients([(np.ones(30_000, np.float32), w), (np.ones(3, np.float32), b)])
    return w.name, b.name

strategy.run(step)
"""
ENDLESS = "while True:\n    strategy.run(step)\n    print('one more', flush=True)\n"
HELD = "held = strategy.statistics(); print(held.variables, held.parameter_nbytes, held.slot_nbytes, w.name, b.name)"


def in_notebook(script: Callable[[Kernel], Awaitable[None]]) -> None:
    async def run() -> None:
        async with notebook() as kernel:
            await script(kernel)

    asyncio.run(run())


def stopped(kernel: Kernel, *options: str) -> Ended:
    """What ``cs-ctl stop`` says of the service of the notebook."""
    return run("cs-ctl", "stop", "--json", *options, str(kernel.process.pid))


def gone(processes: list[psutil.Process]) -> bool:
    return not living_after(unit(10), processes)


def test_the_page_runs_cell_by_cell(tmp_path: object) -> None:
    cells = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

    async def script(kernel: Kernel) -> None:
        shown = [await kernel.run(cell) for cell in cells]
        assert not [each for each in shown if "Error" in each]
        assert float(shown[2]) < 1e-3
        assert shown[3] == "w True\n"
        assert "still runs" not in "".join(shown)
        assert shown[6] == "1\n"
        assert "<cs.Variable 'w'" in shown[7]
        assert gone(kernel.children())

    in_notebook(script)


def test_a_cell_that_waits_says_for_whom() -> None:
    waits = """
import os, time
os.environ["CS_NAME_WAITS"] = "0.1"
with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as slow:
    slow.run(lambda: cs.get_replica_context().replica_id_in_sync_group == 1 and time.sleep(4))
"""

    async def script(kernel: Kernel) -> None:
        shown = await kernel.run("import central_storage as cs\n" + waits)
        assert re.search(r"waiting \d+ s for run 1.*replica 1 ", shown)

    in_notebook(script)


def test_a_cell_shows_tables_and_progress() -> None:
    train = """
data = strategy.experimental_distribute_dataset(cs.data.Dataset.range(6).batch(2))
for _ in strategy.run_steps(lambda rows: rows.sum(), data, progress="training"):
    pass
"""

    async def script(kernel: Kernel) -> None:
        await kernel.run(STRATEGY + MODEL)
        assert "<svg" in await kernel.html("w")
        assert "<td>worker 1</td>" in await kernel.html("strategy")
        assert "DistributedDataset" in await kernel.html(train + "data")
        assert "model_id" in await kernel.data(train, "application/vnd.jupyter.widget-view+json")
        await kernel.run("import sys, tqdm; del sys.modules['tqdm.notebook'], tqdm.notebook")
        await kernel.run("sys.modules['ipywidgets'] = None")
        assert re.search(r"training: 100%.*3/3", await kernel.run(train))

    in_notebook(script)


def test_the_strategy_cell_run_again_ends_the_old_service() -> None:
    async def script(kernel: Kernel) -> None:
        await kernel.run(STRATEGY + MODEL)
        await kernel.run(STEP)
        old = kernel.children()
        assert len(old) == 4
        assert "still runs" not in await kernel.run(STRATEGY + MODEL + STEP)
        assert gone(old)
        assert len(kernel.children()) == 4

    in_notebook(script)


@pytest.mark.slow
def test_an_old_service_that_is_held_is_named_once_and_can_be_ended() -> None:
    async def script(kernel: Kernel) -> None:
        await kernel.run(STRATEGY + MODEL + STEP + "\nkept = {'of': [w]}")
        old = kernel.children()
        await kernel.run("b")  # which IPython keeps
        await kernel.run("def train(s): s.run(lambda: 1 / 0)\ntrain(strategy)")  # whose traceback IPython keeps
        said = await kernel.run(STRATEGY + MODEL + STEP)
        (line,) = [line for line in said.splitlines() if "still runs" in line]
        assert "with 4 processes, because it is held by " in line
        holders = line.partition("held by ")[2].partition(". Run")[0].split(", ")
        assert set(holders) >= {"kept", "Out[2]"}
        assert not {"w", "b", "optimizer", "strategy", "get_ipython"} & set(holders)
        assert "still runs" not in await kernel.run("strategy.run(step)")
        await kernel.run(line.partition("end it: ")[2])
        assert gone(old)
        assert await kernel.run("print(len(cs.running_strategies()))") == "1\n"

    in_notebook(script)


def test_the_model_cell_run_again_frees_the_old_model_and_names_come_back() -> None:
    async def script(kernel: Kernel) -> None:
        await kernel.run(STRATEGY)
        for _ in range(3):
            shown = await kernel.run(MODEL + STEP)
            assert "PerReplica" not in shown
            assert ("'w'" in shown, "'Variable'" in shown) == (True, True)
            assert await kernel.run(HELD) == "2 120012 240024 w Variable\n"

    in_notebook(script)


@pytest.mark.slow
def test_a_model_that_is_an_object_goes_with_its_last_name() -> None:
    model = """
import gc
gc.disable()

class Model:
    def __init__(self):
        self.w = cs.Variable(np.zeros(3, np.float32), name="w")
        self.optimizer = cs.optimizers.SGD(0.1)

    @cs.function
    def step(self):
        self.optimizer.apply_gradients([(np.ones(3, np.float32), self.w)])

with strategy.scope():
    model = Model()
strategy.run(model.step)
print(model.w.name, strategy.statistics().variables)
"""

    async def script(kernel: Kernel) -> None:
        await kernel.run(STRATEGY)
        assert [await kernel.run(model) for _ in range(3)] == ["w 1\n"] * 3

    in_notebook(script)


@pytest.mark.slow
def test_a_checkpoint_fits_after_a_restart_of_the_kernel(tmp_path: object) -> None:
    async def before(kernel: Kernel) -> None:
        await kernel.run(STRATEGY)
        for _ in range(2):
            await kernel.run(MODEL)
        assert "Error" not in await kernel.run(
            f"w.assign(np.full(30_000, 7, np.float32)); strategy.save({str(tmp_path)!r})"
        )

    async def after(kernel: Kernel) -> None:
        await kernel.run(STRATEGY + MODEL)
        assert await kernel.run(f"strategy.restore({str(tmp_path)!r}); print(w.numpy()[0])") == "7.0\n"

    in_notebook(before)
    in_notebook(after)


def test_a_frozen_function_follows_names_that_cells_give_again() -> None:
    cell = """
@cs.function
def read():
    calls.append(1)
    return int(scale(w)[0]), rate, len(calls)
"""

    async def script(kernel: Kernel) -> None:
        await kernel.run(STRATEGY + MODEL + "calls, rate = [], 1\ndef scale(v): return 2 * v.numpy()\n" + cell)
        await kernel.run("w.assign(np.full(30_000, 3, np.float32));")
        assert await kernel.run("strategy.run(read)") == "(6, 1, 1)"
        assert await kernel.run("rate = 5; strategy.run(read)") == "(6, 1, 2)"  # numbers stay as they were
        assert await kernel.run(MODEL + "strategy.run(read)") == "(0, 5, 1)"
        assert await kernel.run("w.assign(np.ones(30_000, np.float32)); strategy.run(read)") == "(2, 5, 2)"
        assert await kernel.run("def scale(v): return 9 * v.numpy()\nstrategy.run(read)") == "(9, 5, 1)"
        assert await kernel.run(HELD) == "2 120012 0 w Variable\n"

    in_notebook(script)


@pytest.mark.slow
def test_workers_drop_a_frozen_function_that_no_cell_has() -> None:
    cell = """
def make(n):
    large = np.full(1000, n)

    @cs.function
    def captures():
        return large.size

    return captures

captured = make(NUMBER)
strategy.run(captured)
"""
    count = """
def count():
    import gc
    return sum(getattr(each, "__qualname__", "") == "make.<locals>.captures" for each in gc.get_objects())
strategy.run(count)
"""

    async def script(kernel: Kernel) -> None:
        await kernel.run(STRATEGY)
        for number in range(3):
            assert await kernel.run(cell.replace("NUMBER", str(number))) == "1000"
            assert await kernel.run(count) == "1"

    in_notebook(script)


def test_the_stop_button_interrupts_a_run_and_the_next_cell_goes_on() -> None:
    async def script(kernel: Kernel) -> None:
        await kernel.run(STRATEGY + MODEL + STEP)
        waiting = "import time\nstrategy.run(lambda: print('in a run', flush=True) or time.sleep(600))"
        for code, printed in ((ENDLESS, "one more"), (waiting, "in a run")):
            running = await kernel.run_until(code, printed)
            await kernel.interrupt()
            shown = await running
            assert "KeyboardInterrupt" in shown
            assert "central_storage/" not in shown
            assert "'w'" in await kernel.run("strategy.run(step)")

    in_notebook(script)


def test_a_kernel_that_is_killed_in_a_loop_leaves_nothing_behind() -> None:
    async def script(kernel: Kernel) -> None:
        await kernel.run(STRATEGY + MODEL + STEP)
        running = await kernel.run_until(ENDLESS, "one more")
        children = kernel.children()
        assert len(children) == 4
        kernel.process.kill()
        assert gone(children)
        with pytest.raises(DeadKernelError):
            await running

    in_notebook(script)


def test_tracebacks_show_the_cells_and_the_replicas_line() -> None:
    cell = """
def helper(x):
    return 1 / x  # the line

@cs.function
def fails(x):
    return helper(x)

def train():
    strategy.run(fails, args=(0,))

train()
"""

    async def script(kernel: Kernel) -> None:
        await kernel.run(STRATEGY + MODEL)
        shown = await kernel.run(cell)
        assert shown.index("train()") < shown.index("strategy.run(fails, args=(0,))") < shown.index("in replica 0")
        assert "return 1 / x  # the line" in shown.partition("in replica 0")[2]
        for code in (
            cell,
            "w.assign([1])",
            "strategy.experimental_distribute_dataset(3)",
            "cs.Variable([[1], [2, 3]])",
        ):
            shown = await kernel.run(code)
            assert "Error" in shown
            assert "central_storage/" not in shown
            assert "cs_worker" not in shown
            assert "skipping hidden" not in shown
        await kernel.run("os.environ['CS_TRACEBACK'] = 'full'")
        assert "central_storage/" in await kernel.run("w.assign([1])")

    in_notebook(script)


@pytest.mark.slow
def test_completion_shows_public_names() -> None:
    async def script(kernel: Kernel) -> None:
        await kernel.run(STRATEGY + MODEL)
        shown = await kernel.run(
            "from IPython.core.completer import provisionalcompleter\n"
            "for text in ('strategy.', 'w.', 'optimizer.', 'cs.', 'cs.nn.', 'strategy.extended.'):\n"
            "    with provisionalcompleter():\n"
            "        print(*[each.text for each in get_ipython().Completer.completions(text, len(text))])\n"
        )
        names = [set(line.split()) for line in shown.splitlines()]
        assert all(names)
        assert {"run", "scope"} < names[0]
        assert {"assign", "numpy"} < names[1]
        assert names[4] >= {"compute_average_loss"}
        for internal in ("controller", "adopt", "from_record", "np", "Any", "handles", "remember", "kind"):
            assert not any(internal in each for each in names), internal
        assert not [name for each in names for name in each if name.startswith("_")]

    in_notebook(script)


@pytest.mark.parametrize("is_busy", [False, True])
def test_cs_ctl_stop_ends_the_service_and_leaves_the_notebook(is_busy: bool) -> None:
    async def script(kernel: Kernel) -> None:
        for cell in (STRATEGY, MODEL, STEP):
            await kernel.run(cell)
        service = kernel.children()
        cell = await kernel.run_until(ENDLESS, "one more") if is_busy else None
        said = json.loads((await asyncio.to_thread(stopped, kernel)).ok().out)
        assert said["signals"] == ["SIGINT", "SIGTERM"]
        assert gone(service)
        if cell is not None:
            assert re.search("KeyboardInterrupt|ShutdownError", await cell)
        assert await kernel.run("print(1 + 1)") == "2\n"
        assert "ShutdownError" in await kernel.run("strategy.run(step)")
        for text in (STRATEGY, MODEL, STEP):
            assert "Error" not in await kernel.run(text)  # a new service
        assert (await kernel.run("print(w.numpy().shape)")) == "(30000,)\n"

    in_notebook(script)


def test_cs_ctl_stop_ends_no_service_in_threads_of_a_notebook() -> None:
    async def script(kernel: Kernel) -> None:
        await kernel.run(STRATEGY.replace("])", "], in_process=True)"))
        await kernel.run(MODEL)
        await kernel.run(STEP)
        cell = await kernel.run_until(ENDLESS, "one more")
        ended = await asyncio.to_thread(stopped, kernel, "--wait", "0.5")
        assert ended.code == 4
        assert "runs in threads of a notebook: shut it down there" in ended.err
        assert "KeyboardInterrupt" in await cell
        assert await kernel.run("strategy.shutdown(); print('shut down')") == "shut down\n"

    in_notebook(script)
