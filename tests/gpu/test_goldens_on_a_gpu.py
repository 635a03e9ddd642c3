"""TensorFlow's recorded results once more, with all replicas on one GPU and the variables beside them or on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from operator import attrgetter

import pytest
from tests.conformance.adapter import perform
from tests.conformance.answers import differences
from tests.conformance.cases import Case
from tests.conformance.test_goldens import CASES, NAME_CPUS

import central_storage as cs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(func_only=True),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*no gradient for:UserWarning"),
    pytest.mark.filterwarnings("ignore:synchronization=ON_READ has no effect:UserWarning"),
]

#: One strategy for each number of replicas is kept; programs that need several at once, or raise, say nothing of GPUs.
RUN = [
    case
    for case in CASES
    if not case.left_out and len(case.strategies) == 1 and "value" in case.answer and case.id not in NAME_CPUS
]


class Strategies:
    """Strategies by number of replicas, made when first needed."""

    def __init__(self, parameter_device: str, stack: ExitStack) -> None:
        self._parameter_device = parameter_device
        self._stack = stack
        self._made: dict[int, cs.CentralStorageStrategy] = {}

    def of(self, replicas: int) -> cs.CentralStorageStrategy:
        if replicas not in self._made:
            strategy = cs.CentralStorageStrategy(["gpu:0"] * replicas, self._parameter_device)
            self._made[replicas] = self._stack.enter_context(strategy)
        return self._made[replicas]


@pytest.fixture(scope="module", params=["cpu:0", "gpu:0"])
def strategies(request: pytest.FixtureRequest) -> Iterator[Strategies]:
    with ExitStack() as stack:
        made = Strategies(request.param, stack)
        for replicas in sorted({case.n_replicas for case in RUN}):
            made.of(replicas).run(lambda: None)
        yield made


@pytest.mark.parametrize("case", RUN, ids=attrgetter("id"))
def test_case(strategies: Strategies, case: Case) -> None:
    got = perform(case, [strategies.of(case.n_replicas)], cs.CentralStorageStrategy)
    assert list(differences(case.answer["value"], got, 1e-4)) == []
