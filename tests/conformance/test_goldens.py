"""Every recorded program of TensorFlow's own class gives here what it gave there, and others what its rules say."""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar

import pytest
from tests.harness.cupy_stand_in.c_kernels import COMPILER
from tests.harness.services import connected
from tests.harness.stand_in_gpus import stand_in_gpus

import central_storage as cs

from .adapter import perform
from .answers import differences, shown
from .cases import DECISIONS, NEEDS, QUIRK, Case, load, load_rules

#: How replicas live, as arguments of the strategy.
MODES: dict[str, dict[str, Any]] = {
    "processes": {},
    "threads": {"in_process": True},
    "gpus": {},  # stand-ins for them; the variables are on a CPU
    "gpus, variables too": {},
    "cpus, variables on one of the gpus": {},
}
#: Programs that say the names of CPUs, or that there is no GPU.
NAME_CPUS = {
    "context/devices",
    "devices/default_no_gpu",
    "devices/gpu_missing",
    "devices/parameter_only",
    "extended/full_name",
    "extended/wdbr",
    "extended/worker_devices",
}

pytestmark = [
    pytest.mark.timeout(func_only=True),  # a case, not the start of the services before the first
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*no gradient for:UserWarning"),
    pytest.mark.filterwarnings("ignore:synchronization=ON_READ has no effect:UserWarning"),
]

CASES = load()
#: What is run, and the programs of the rules.
PROGRAMS = [*(case for case in CASES if not case.left_out), *load_rules()]
#: What is not run, by reason: none of these could give what TensorFlow gave.
LEFT_OUT = {
    QUIRK: {
        "extended/batch_reduce_to_plain_sum",
        "optimizer/keras3/adadelta/sparse",
        "optimizer/keras3/adam/sparse",
        "optimizer/keras3/adam_amsgrad/sparse",
        "optimizer/keras3/ftrl_l1_l2/sparse",
        "optimizer/keras3/rmsprop_centered/sparse",
        "optimizer/keras3/rmsprop_momentum/sparse",
        "optimizer/keras3/sgd/sparse",
        "optimizer/keras3/sgd_momentum/sparse",
        "reduce/plain_py_zero/SUM",
        "values_fn/not_implemented_before_2_4",
    },
    NEEDS["tape"]: {"all_reduce/gradient", "variable/gather_gradient_is_sparse"},
    NEEDS["fit"]: {
        "keras/fit_n1_rows9_batch4",
        "keras/fit_n2_rows8_batch3",
        "keras/fit_n2_rows8_batch4",
        "keras/fit_n2_rows9_batch4",
    },
    NEEDS["batch_norm"]: {"keras/batch_norm_moving_mean"},
}


def test_the_programs_that_name_cpus_are_there() -> None:
    assert {case.id for case in PROGRAMS} >= NAME_CPUS


def test_every_case_is_run_or_left_out_for_a_reason() -> None:
    found: dict[str, set[str]] = {}
    for case in CASES:
        if case.left_out:
            found.setdefault(case.left_out, set()).add(case.id)
    assert found == LEFT_OUT
    assert (len(CASES), sum(map(len, found.values()))) == (368, 18)
    assert [key for key in DECISIONS if not any(case.id.startswith(key) for case in CASES)] == []


class Pool:
    """Running strategies of one mode: for each number of replicas as many as one case uses at once."""

    def __init__(self, mode: str, cases: Iterable[Case], stack: ExitStack) -> None:
        self.make = partial(cs.CentralStorageStrategy, **MODES[mode])
        kind = "gpu" if mode.startswith("gpus") else "cpu"
        owner = "gpu:0" if "variables" in mode else "cpu:0"
        needed: Counter[int] = Counter()
        for case in cases:
            needed |= Counter(case.strategies)
        self._strategies = {
            n: [stack.enter_context(self.make([f"{kind}:{i}" for i in range(n)], owner)) for _ in range(count)]
            for n, count in needed.items()
        }
        for strategy in chain.from_iterable(self._strategies.values()):
            connected(strategy, nested=True)

    def lend(self, counts: Iterable[int]) -> list[cs.CentralStorageStrategy]:
        """One strategy for each number of replicas in ``counts``, no two of them the same."""
        free = {n: iter(strategies) for n, strategies in self._strategies.items()}
        return [next(free[n]) for n in counts]


@pytest.fixture(scope="class")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """The strategies that the selected programs of a mode need, kept for all of them."""
    mode = request.cls.mode
    items = (item for item in request.session.items if isinstance(item, pytest.Function) and item.cls is request.cls)
    cases = [item.callspec.params["case"] for item in items]
    with ExitStack() as stack:
        if "gpus" in mode:
            if "variables" in mode and COMPILER is None:
                pytest.skip("no gcc here to run kernels without a GPU")
            stack.enter_context(stand_in_gpus(max((n for case in cases for n in case.strategies), default=0)))
        yield Pool(mode, cases, stack)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Which programs are run in a mode."""
    if metafunc.cls is not None:
        cases = [case for case in PROGRAMS if "gpus" not in metafunc.cls.mode or case.id not in NAME_CPUS]
        metafunc.parametrize("case", cases, ids=attrgetter("id"))


class Programs:
    """Each gives what it gave there, or what its rule says."""

    mode: ClassVar[str]

    def test_case(self, pool: Pool, case: Case) -> None:
        strategies = pool.lend(case.strategies)
        if "raises" in case.answer:
            with pytest.raises(_exception(case.answer["raises"])):
                perform(case, strategies, pool.make)
            return
        got = perform(case, strategies, pool.make)
        if "text" in case.answer:
            assert shown(got) == case.answer["text"]
        else:
            tolerance = 1e-4 if case.kind == "training" else 1e-5
            assert list(differences(case.answer["value"], got, tolerance)) == []


class TestProcesses(Programs):
    mode = "processes"


@pytest.mark.slow
class TestThreads(Programs):
    mode = "threads"


@pytest.mark.slow
class TestGpus(Programs):
    mode = "gpus"


@pytest.mark.slow
class TestGpusAndVariables(Programs):
    mode = "gpus, variables too"


@pytest.mark.slow
class TestVariablesOnAGpu(Programs):
    mode = "cpus, variables on one of the gpus"


def _exception(name: str) -> type[BaseException]:
    found = getattr(cs.errors, name, None) or getattr(builtins, name)
    assert issubclass(found, BaseException)
    return found
