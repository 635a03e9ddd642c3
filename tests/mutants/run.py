"""Breaks lines that keep promises, one at a time, and demands that a test near each of them fails.

    python -m tests.mutants.run                       every mutation of list.toml that has no verdict yet
    python -m tests.mutants.run --only undo-no-keep   one of them; may be repeated
    python -m tests.mutants.run --only P2             those of a promise
    python -m tests.mutants.run --fresh               all of them again

Each mutation replaces one piece of text in a copy of the tree, where its tests run. They must fail there, and pass in a
copy without the mutation. Verdicts are kept in ``build/mutants.json`` as long as the mutated file and the tests stay
the same, so an interrupted run continues. The exit code is 0 if every mutation was noticed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

import psutil
from tests.harness.processes import ROOT, reap
from tests.harness.timing import unit

__all__ = ["LIST", "Mutation", "Verdict", "chosen", "judge", "listed", "main", "report", "tested", "tree"]

LIST = Path(__file__).with_name("list.toml")
STATE = ROOT / "build" / "mutants.json"
# The environment variable by which what the tests of a mutation leave is found.
_MARK = "CS_TEST_MUTANT"
# Seconds after which tests that have not ended count as failed: a mutation may make them wait for ever.
_LIMIT = 600.0
# The same for one test: long enough that a busy machine alone fails none.
_TEST_LIMIT = 240.0
_PASSED, _FAILED = 0, 1
_PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=sample")
_FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_ROOTS = ("proto", "server", "worker", "client", ".")


@dataclass(frozen=True)
class Mutation:
    """A line that is broken: in ``path``, ``old`` becomes ``new``. One of ``tests`` must fail then."""

    name: str
    #: The promise that the line keeps, such as ``P2``.
    promise: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    #: Why no test can notice it; empty if one must.
    survives: str = ""

    def applied(self, text: str) -> str:
        """The text of the file with the mutation. Raises ValueError unless ``old`` is in it exactly once."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: {self.path} has the text {self.old!r} {count} times, not once")
        return text.replace(self.old, self.new)

    def digest(self) -> str:
        """Changes with the mutation, with the file that it breaks, and with its tests."""
        digest = hashlib.sha256(repr(self).encode())
        for path in (self.path, *dict.fromkeys(test.partition("::")[0] for test in self.tests)):
            digest.update((ROOT / path).read_bytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Verdict:
    """What became of a mutation."""

    digest: str
    #: ``noticed``, ``survived``, or ``broken``: its tests cannot be run, or fail without it, too.
    outcome: str
    #: The first test that failed, or what went wrong.
    by: str
    seconds: float = 0.0


def listed(path: Path = LIST) -> list[Mutation]:
    """The mutations of the list."""
    entries = tomllib.loads(path.read_text())["mutation"]
    return [Mutation(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def chosen(mutations: Sequence[Mutation], only: Sequence[str]) -> list[Mutation]:
    """Those with one of these names, or of one of these promises; all if ``only`` is empty. Raises ValueError for a
    word that chooses none."""
    for word in only:
        if not any(word in (mutation.name, mutation.promise) for mutation in mutations):
            raise ValueError(f"no mutation of {LIST.name} has the name or the promise {word!r}")
    return [mutation for mutation in mutations if not only or {mutation.name, mutation.promise} & set(only)]


@contextmanager
def tree() -> Iterator[Path]:
    """A copy of the files of this tree that git knows or does not ignore."""
    asked = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(asked, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    with tempfile.TemporaryDirectory(prefix="csm-") as directory:
        for name in filter(None, names):
            if (ROOT / name).exists():  # else it is deleted, and not committed
                target = Path(directory, "tree", name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        for name in ("run", "tmp"):
            Path(directory, name).mkdir(mode=0o700)
        yield Path(directory, "tree")


def judge(mutation: Mutation, copy: Path) -> Verdict:
    """Run the tests of ``mutation`` in ``copy`` with it. The file is as before afterwards."""
    broken = copy / mutation.path
    text = broken.read_text()
    _write(broken, mutation.applied(text))
    try:
        code, first, seconds = tested(mutation.tests, copy)
    finally:
        _write(broken, text)
    outcomes = {_PASSED: "survived", _FAILED: "noticed"}
    return Verdict(mutation.digest(), outcomes.get(code, "broken"), first, round(seconds, 1))


def _write(path: Path, text: str) -> None:
    """Write a file with a time of its own: else Python would take what it has compiled of one of the same second and
    size."""
    before = path.stat().st_mtime_ns
    path.write_text(text)
    os.utime(path, ns=(before, before + 2_000_000_000))


def tested(tests: Sequence[str], copy: Path) -> tuple[int, str, float]:
    """The exit code of these tests in a copy of the tree, the first of them that failed or else the last words, and the
    seconds it took."""
    mark = secrets.token_hex(8)
    environment = {
        **os.environ,
        _MARK: mark,
        "PYTHONPATH": os.pathsep.join(str(copy / root) for root in _ROOTS),
        "XDG_RUNTIME_DIR": str(copy.parent / "run"),
        "TMPDIR": str(copy.parent / "tmp"),
        "PYTEST_TIMEOUT": str(unit(_TEST_LIMIT)),
    }
    command = [*_PYTEST, *tests]
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=unit(_LIMIT),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _FAILED, f"not over within {unit(_LIMIT):g} s", time.monotonic() - begun
    finally:
        reap(_left(mark))
    found = _FIRST_FAILURE.search(done.stdout)
    said = "a test hangs" if "+ Timeout +" in done.stdout else done.stdout[-2000:]
    first = found[1] if found else "" if done.returncode == _PASSED else said
    return done.returncode, first, time.monotonic() - begun


def _left(mark: str) -> list[psutil.Process]:
    """What still runs of the tests with this mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_MARK) == mark:
                found.append(process)
    return found


class _Run:
    """One call of the command: which verdicts there are, and the copies of the tree that are free."""

    def __init__(self, verdicts: dict[str, Verdict], copies: Sequence[Path]) -> None:
        self.verdicts = verdicts
        self._copies: SimpleQueue[Path] = SimpleQueue()
        for copy in copies:
            self._copies.put(copy)
        self._lock = threading.Lock()
        #: What the tests say without a mutation: "" where they pass. One thread asks for each.
        self._sound: dict[tuple[str, ...], Future[str]] = {}

    def judge(self, mutation: Mutation) -> None:
        """Find the verdict of one mutation, and keep it."""
        copy = self._copies.get()
        try:
            fault = self._fault(mutation.tests, copy)
            verdict = Verdict(mutation.digest(), "broken", fault) if fault else judge(mutation, copy)
        finally:
            self._copies.put(copy)
        with self._lock:
            self.verdicts[mutation.name] = verdict
            save(self.verdicts)
            print(f"{verdict.outcome:9}{mutation.name} ({mutation.promise}, {verdict.seconds:g} s) {verdict.by}")
            sys.stdout.flush()

    def _fault(self, tests: tuple[str, ...], copy: Path) -> str:
        """What is wrong with these tests where nothing is mutated."""
        with self._lock:
            known = self._sound.get(tests)
            answer = self._sound.setdefault(tests, Future())
        if known is None:
            code, first, _ = tested(tests, copy)
            answer.set_result("" if code == _PASSED else f"without the mutation: {first or code}")
        return answer.result()


def load() -> dict[str, Verdict]:
    """The verdicts of earlier calls."""
    if not STATE.exists():
        return {}
    return {name: Verdict(**kept) for name, kept in json.loads(STATE.read_text()).items()}


def save(verdicts: dict[str, Verdict]) -> None:
    """Keep the verdicts for the next call."""
    STATE.parent.mkdir(exist_ok=True)
    fresh = STATE.with_suffix(".new")
    fresh.write_text(json.dumps({name: asdict(verdict) for name, verdict in verdicts.items()}, indent=1))
    fresh.replace(STATE)


def report(mutations: Sequence[Mutation], verdicts: dict[str, Verdict]) -> tuple[str, bool]:
    """What is known of these mutations, in words, and whether all is as the list says."""
    outcomes = Counter(verdicts[mutation.name].outcome for mutation in mutations)
    lines = [f"{len(mutations)} mutations: " + ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))]
    is_right = True
    for mutation in mutations:
        verdict = verdicts[mutation.name]
        expected = "survived" if mutation.survives else "noticed"
        if verdict.outcome == expected == "survived":
            lines.append(f"survived, as expected: {mutation.name}: {mutation.survives}")
        elif verdict.outcome != expected:
            is_right = False
            lines.append(f"{verdict.outcome.upper()}: {mutation.name} ({mutation.path}) {verdict.by}")
    return "\n".join(lines), is_right


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        mutations = chosen(listed(), options.only)
    except ValueError as error:
        _parser().error(str(error))
    verdicts = load()
    left = [
        mutation
        for mutation in mutations
        if options.fresh or mutation.name not in verdicts or verdicts[mutation.name].digest != mutation.digest()
    ]
    with ExitStack() as stack:
        jobs = min(options.jobs, len(left))
        run = _Run(verdicts, [stack.enter_context(tree()) for _ in range(jobs)])
        with ThreadPoolExecutor(max(jobs, 1)) as pool:
            for future in [pool.submit(run.judge, mutation) for mutation in left]:
                future.result()
    text, is_right = report(mutations, verdicts)
    print(text)
    return 0 if is_right else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tests.mutants.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME|P2", help="a mutation, or a promise")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutations at once (default: processors)")
    parser.add_argument("--fresh", action="store_true", help="forget the verdicts of earlier calls")
    return parser


if __name__ == "__main__":
    sys.exit(main())
