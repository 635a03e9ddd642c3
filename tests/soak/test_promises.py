"""The short tier: a session of each promise with few trials, every place of the failpoints, and sabotage.

Where a guarantee is switched off (``sabotage/sitecustomize.py``), the trials of its promise must find that; a session
that passes then would pass without the guarantee, too.
"""

from __future__ import annotations

import sys
from itertools import product

import pytest
from tests.harness.cupy_stand_in.c_kernels import COMPILER
from tests.harness.processes import run
from tests.harness.timing import unit
from tests.soak import promises
from tests.soak.history import check
from tests.soak.promises import PROMISES, VISITED
from tests.soak.sessions import WAYS, sabotaged, session, way_of

_NEEDS_GCC = pytest.mark.skipif(COMPILER is None, reason="no gcc here to run kernels without a GPU")
#: Of each promise the seed of the session that is tried, and the number of trials.
TRIALS = {
    "P1": (303, 4),
    "P2": (1, 4),
    "P3": (1, 4),
    "P4": (124, 4),
    "P5": (1, 12_000),
    "P6": (1, 2),
    "P7": (1, 80),
    "P9": (1, 2),
    "P21": (1, 2),
    "P23": (1, 8_000),
    "P24": (1, 200),
    "P44": (1, 6),
}
#: The guarantee that is switched off, and what the trials of a promise find then.
SABOTAGED = {
    "P1": ("replay-committed", "began with"),
    "P2": ("no-undo", "stood"),
    "P3": ("no-redo", "stood"),
    "P4": ("naive-retry", "began with"),
    "P5": ("no-dedup", "ledger is "),
    "P6": ("no-fence", "and goes on"),
    "P7": ("unguarded-read", "is torn"),
    "P9": ("no-seed", "has other results"),
    "P21": ("silent", "nobody said"),
    "P23": ("leak", "descriptors more"),
    "P24": ("no-goodbye", "the server's tables have"),
    "P44": ("stale-mirror", "began with"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(pytest.param(name, "program", marks=[_NEEDS_GCC] * (name == "P3")) for name in TRIALS),
        *product(("P1", "P2"), ("messages", "zeromq")),
    ],
)
def test_a_promise_is_kept(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in way_of(way).items():
        monkeypatch.setenv(variable, value)  # for the processes of the session
    seed, trials = TRIALS[name]
    attempt = PROMISES[name].session(seed, trials)
    assert attempt.violations == []
    assert attempt.tried == trials


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[_NEEDS_GCC] * (name == "P3")) for name in SABOTAGED if name != "P5"]
)
def test_a_promise_that_is_broken_is_found_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (seed, trials), (sabotage, words) = TRIALS[name], SABOTAGED[name]
    for variable, value in sabotaged(sabotage).items():
        monkeypatch.setenv(variable, value)  # for the processes of the session
    monkeypatch.setattr(promises, "_REFUSED_WITHIN", 1.0)  # a worker that is not refused goes on for ever
    assert words in "\n".join(PROMISES[name].session(seed, trials).violations)


@pytest.mark.timeout(300)
def test_the_command_of_a_session_finds_a_broken_promise() -> None:
    """The service of P5 is in the process of the session, which therefore is one of its own."""
    (seed, trials), (sabotage, words) = TRIALS["P5"], SABOTAGED["P5"]
    arguments = ("-m", "tests.soak.run", "--promise", "P5", "--seed", str(seed), "--trials", str(trials), "--tell")
    ended = run(sys.executable, *arguments, environment=sabotaged(sabotage), timeout=unit(200))
    assert ended.code == 1, ended
    assert words in ended.out, ended


@pytest.mark.parametrize("way", WAYS)
def test_training_comes_to_every_failpoint(way: str) -> None:
    """Only where steps go by a program, it comes to the places in it."""
    with session("--own-reads", environment={"CS_FAILPOINTS": "*=note", **way_of(way)}) as trained:
        trained.wait_for_steps(30)
        assert check(trained.history, trained.finish()) == []
        assert trained.fired == set(VISITED) - ({"server.pass"} if way != "program" else set())
