"""Every code block of TensorFlow's pages about the strategy runs as it is printed, under one table of names.

Where something else comes out than the page prints, ``DIFFERENCES`` says what, and docs/from-tensorflow.md says why.
"""

from __future__ import annotations

import builtins
import inspect
import io
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout, suppress
from doctest import NORMALIZE_WHITESPACE, OutputChecker
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.harness.services import connected
from tests.seeds import pages

import central_storage as cs

pytestmark = pytest.mark.skipif(
    not pages.PAGES, reason=f"TensorFlow's pages are not in {pages.FOLDER}; CS_SEED_PAGES names another folder"
)

BLOCKS = pages.blocks()
#: The blocks that show a signature: a name and parameters, without values.
SIGNATURE = re.compile(r"\s*([\w.]+)\(\s*((?:\w+(?:=\w+|=\(\))?,?\s*)*)\)\s*")


class Difference(NamedTuple):
    """A block that holds all of ``where`` raises ``error`` as it is printed, and runs with the ``repairs``."""

    where: tuple[str, ...]
    error: type[Exception]
    said: str | None
    #: A word of its row on the page.
    row: str
    repairs: tuple[tuple[str, str], ...] = ()


DIFFERENCES = (
    Difference(
        ("Dataset.range(10)\n",),
        cs.errors.UnbatchedDatasetError,
        "batch the data set",
        "`Dataset.range(10)`",
        (("range(10)", "range(8).batch(8)"), ("# result: 28", "# result: 56")),
    ),
    Difference(
        ("ctx.replica_id]",),
        AttributeError,
        "replica_id",
        "`ctx.replica_id`",
        (("ctx.replica_id]", "ctx.replica_id_in_sync_group]"),),
    ),
    Difference(("cluster_resolver.task_type", "},\n'task'"), AttributeError, "task_type", "of `cluster_resolver`"),
    Difference(
        ("num_replicas=4", "split_to_logical_devices"),
        cs.errors.InvalidArgumentError,
        "make 8 pieces, but a replica has 2 devices",
        "with two logical devices",
        (("[1, 1, 2]", "[2, 2, 2]"), ("num_replicas=4", "num_replicas=1")),
    ),
    # A rendering that has lost parts of its lines.
    *(
        Difference((lost,), SyntaxError, None, "`ds =`")
        for lost in (
            "ds =\n",
            "dataset =\n",
            "d =[[",
            "[\"localhost:34567\"]\n'task'",
            "device_assignment =\n",
            "= (\nlocal",
        )
    ),
    Difference(("with tf.device(worker_devices[i]):\n\n",), SyntaxError, None, "`ds =`"),
)
#: (what a page prints, what is printed here instead, a word of its row)
OTHER_OUTPUTS = (
    (r"MirroredVariable:\{\s*0: (<[^>]*>),.*\}", r"\1", "`MirroredVariable`"),
    (r"(?<=<cs.Variable ')(\w+):0(?=')", r"\1", "`MirroredVariable`"),
)


class Enough(Exception):
    """A loop without end has gone round a few times."""


class Names:
    """The names of a block while it runs: those of its functions, too. Counts the rounds of a loop without end."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        self.rounds: list[Any] = []

    def __getitem__(self, name: str) -> Any:
        return self.names[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.names[name] = value
        if name == "replica_results":
            self.rounds.append(value)
            if len(self.rounds) == 3:
                raise Enough


#: The devices in the pages, after the renaming: their services start once. Those with many devices run in one process.
LAYOUTS: list[tuple[Any, str | None]] = [
    (None, None),
    (["CPU:0", "CPU:1"], None),
    (["CPU:0", "CPU:0"], "CPU:0"),
    (["CPU:0", "CPU:1", "CPU:2", "CPU:3"], None),
    ([("CPU:0", "CPU:1"), ("CPU:2", "CPU:3"), ("CPU:4", "CPU:5"), ("CPU:6", "CPU:7")], None),
    ([tuple(f"CPU:{number}" for number in range(8))], None),
    ([("CPU:0", "CPU:1")], None),
]
Services = Callable[..., cs.CentralStorageStrategy]


@pytest.fixture(scope="module")
def started() -> Iterator[dict[str, cs.CentralStorageStrategy]]:
    found: dict[str, cs.CentralStorageStrategy] = {}
    with ExitStack() as stack:
        for devices, parameters in LAYOUTS:
            in_process = devices is not None and (len(devices) > 2 or isinstance(devices[0], tuple))
            strategy = cs.CentralStorageStrategy(devices, parameters, in_process=in_process)
            found[str((devices, parameters))] = connected(stack.enter_context(strategy))
        yield found


@pytest.fixture
def services(started: dict[str, cs.CentralStorageStrategy]) -> Iterator[Services]:
    """The class, as the blocks call it: one of the services that are there or, for other devices, a new one."""
    original = cs.CentralStorageStrategy
    with ExitStack() as stack:

        def find(compute_devices: Any = None, parameter_device: Any = None) -> cs.CentralStorageStrategy:
            found = started.get(str((compute_devices, parameter_device)))
            return found or stack.enter_context(original(compute_devices, parameter_device))

        yield find


class Runner:
    """Runs blocks; holds what they print."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.names = Names({})
        self.printed = ""

    def run(self, text: str) -> None:
        """Run ``text`` as it is, and compare its outputs with what the page prints."""
        renamed = pages.renamed(text)
        self.names = Names(self._given(renamed))
        self.printed = ""
        # The pages were made with an older NumPy, which prints numbers without their types.
        with suppress(Enough), np.printoptions(legacy="1.25"), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # what older names say, once a process
            for step in pages.steps(renamed):
                self._compare(step, self._carried_out(step.source))

    def _carried_out(self, source: str) -> str:
        """What an interpreter shows of the statement."""
        is_expression = pages.is_expression(source)
        output = io.StringIO()
        try:
            with redirect_stdout(output):
                code = compile(source.strip(), "page", "eval" if is_expression else "exec")
                value = eval(code, self.names.names, self.names)
        finally:
            self.printed += output.getvalue()
        return output.getvalue() + ("" if value is None else repr(value))

    def _given(self, text: str) -> dict[str, Any]:
        """What the page leaves out."""
        images = np.arange(2 * 2 * 4 * 1, dtype=np.float32).reshape(2, 2, 4, 1)
        given = {
            "__name__": "page",
            "cs": cs,
            "np": np,
            "os": os,
            "json": json,
            "strategy": self._services(["CPU:0", "CPU:1"]),
            "global_batch_size": 4,
            "replica_fn": lambda batch: batch.numpy().sum(),
            "inputs": [images],
            "model": lambda x: np.asarray(x) * 2,
            "loss_fn": lambda labels, output: (labels - output.numpy()).sum(),
        }
        exec(pages.helpers(), given)
        return given

    def _compare(self, step: pages.Step, got: str) -> None:
        if step.wanted:
            wanted = step.wanted
            for there, here, _ in OTHER_OUTPUTS:
                wanted = re.sub(there, here, wanted, flags=re.DOTALL)
            assert OutputChecker().check_output(_words(wanted), _words(got), NORMALIZE_WHITESPACE), got
        for name, result in re.findall(r"# (\w+): (.*)$", step.source, re.MULTILINE):
            if name in self.names.names and not result.startswith("/"):
                assert _words(repr(self.names[name])) == _words(result)


def _words(text: str) -> str:
    """``text`` without the white space that only makes it look good, and without the number that a variable gets where
    its name is taken."""
    text = re.sub(r"'Variable_\d+'", "'Variable'", text)
    return re.sub(r"\s+", " ", re.sub(r"(?<=[\[(])\s+|\s+(?=[\])])", "", text)).strip()


@pytest.fixture
def runner(services: Services, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    monkeypatch.setenv("TF_CONFIG", "")  # a block sets it
    for namespace in (cs, cs.distribute, cs.distribute.experimental):
        monkeypatch.setattr(namespace, "CentralStorageStrategy", services)
    runner = Runner(services)
    yield runner
    runner.names.names.clear()  # ends the threads of iterators that a block has left in the middle


def of(block: pages.Block) -> str:
    return f"{block.page}:{block.line}"


SIGNATURES = [block for block in BLOCKS if SIGNATURE.fullmatch(block.text)]
EXAMPLES = [block for block in BLOCKS if block not in SIGNATURES]


@pytest.mark.parametrize("block", EXAMPLES, ids=map(of, EXAMPLES))
def test_an_example_runs_as_it_is_printed(block: pages.Block, runner: Runner) -> None:
    difference = next((each for each in DIFFERENCES if all(part in block.text for part in each.where)), None)
    if difference is None:
        runner.run(block.text)
        return
    with pytest.raises(difference.error, match=difference.said):
        runner.run(block.text)
    if difference.repairs:
        text = block.text
        for before, after in difference.repairs:
            text = text.replace(before, after)
        runner.run(text)


@pytest.mark.parametrize("block", SIGNATURES, ids=map(of, SIGNATURES))
def test_a_signature_is_the_one_that_is_printed(block: pages.Block) -> None:
    match = SIGNATURE.fullmatch(block.text)
    assert match is not None
    name = match[1].rpartition(".")[2]
    wanted = [part.strip() for part in match[2].split(",") if part.strip()]
    method = cs.CentralStorageStrategy if name in ("__init__", "CentralStorageStrategy") else None
    signature = inspect.signature(method or getattr(cs.CentralStorageStrategy, name))
    found = [
        each.name if each.default is inspect.Parameter.empty else f"{each.name}={each.default}"
        for each in signature.parameters.values()
        if each.name != "self" and each.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    assert found[: len(wanted)] == wanted
    assert all("=" in extra for extra in found[len(wanted) :])  # what a later version added can be left out


def block_with(*words: str) -> str:
    return next(block.text for block in BLOCKS if all(word in block.text for word in words))


def test_the_elements_are_printed_as_the_page_says(runner: Runner) -> None:
    runner.run(block_with("print(x)  # Prints", "dataset = tf."))
    assert runner.printed.splitlines() == ["[0 1]", "[2 3]", "[4 5]", "[6 7]", "[8 9]"]


@pytest.mark.parametrize("way", ["strategy.run(replica_fn", "strategy.experimental_run_v2(replica_fn"])
def test_each_replica_gets_batches_of_its_own(way: str, runner: Runner) -> None:
    runner.run(block_with(way))
    strategy = runner.names["strategy"]
    assert [[float(each) for each in strategy.experimental_local_results(r)] for r in runner.names.rounds] == [
        [2.0, 2.0]
    ] * 3


#: (method, exception) of a *Raises* -> calls that raise it, in a replica of two devices.
REFUSED: dict[tuple[str, str], list[Callable[[cs.CentralStorageStrategy], Any]]] = {
    ("experimental_assign_to_logical_device", "ValueError"): [
        lambda strategy: strategy.experimental_assign_to_logical_device(np.zeros(2), 2),
        lambda strategy: strategy.experimental_assign_to_logical_device(np.zeros(2), -1),
    ],
    ("experimental_split_to_logical_devices", "ValueError"): [
        lambda strategy: strategy.experimental_split_to_logical_devices(np.zeros((2, 2)), [2]),
        lambda strategy: strategy.experimental_split_to_logical_devices(np.zeros((4, 2)), [4, 1]),
        lambda strategy: strategy.experimental_split_to_logical_devices(np.zeros((3, 2)), [2, 1]),
    ],
}


def test_every_raises_is_raised(services: Services) -> None:
    strategy = services([("CPU:0", "CPU:1")])
    assert set(pages.raises()) == REFUSED.keys()
    for (_, kind), calls in REFUSED.items():
        for call in calls:
            with pytest.raises(getattr(builtins, kind)):
                strategy.run(call, (strategy,))


def test_a_batch_of_six_is_cut_in_the_middle(services: Services) -> None:
    strategy = services(["CPU:0", "CPU:1"])
    (six,) = strategy.experimental_distribute_dataset(cs.data.Dataset.range(6).batch(6))
    assert [share.tolist() for share in six.values] == [[0, 1, 2], [3, 4, 5]]
    as_printed = cs.PerReplica([np.float32([0, 1, 2, 3]), np.float32([4, 5])])
    with pytest.raises(ValueError, match="shape"):
        strategy.reduce(cs.distribute.ReduceOp.MEAN, as_printed, axis=None)
    assert strategy.reduce(cs.distribute.ReduceOp.MEAN, as_printed, axis=0).numpy() == 2.5


def test_the_page_tells_every_difference() -> None:
    rows = "\n".join(line for line in pages.section().splitlines() if line.startswith("| "))
    for words in [each.row for each in DIFFERENCES] + [row for _, _, row in OTHER_OUTPUTS]:
        assert words in rows
