"""``make soak``: every promise tried thousands of times, and a table of what came of it.

    python -m tests.soak.run                                  everything; goes on where it was interrupted
    python -m tests.soak.run --promise P1 --promise P2        some of it
    python -m tests.soak.run --promise P1 --seed 17 --trials 20   one session, which is how a failure is looked at
    python -m tests.soak.run --way zeromq                     everything, without mailboxes

``--way`` says how steps go. ``program`` is the way of users: a program carries out the steps that repeat. With
``messages`` there is no program, and with ``zeromq`` there are no mailboxes either.

Sessions run apart, each by the last of these commands. First come those beside which nothing else may run, then one
more at once than there are processors, since each waits now and then, and beside them one that mostly waits. What took
longer than it should, but came, may be the fault of a busy machine: such a session is tried again at the end with
nothing beside it, which decides. A session that did not come to its end by a fault of its own is none: it is named,
and others are tried in its place.

What has been done is in ``build/soak.json``, or ``build/soak-WAY.json``, and belongs to the code it was done with:
after a change of the packages it begins anew, unless ``--keep`` says that the change does not matter. The table names
the commits; it is the one of docs/reliability.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from tests.harness.processes import MARK, ROOT, marked, reap
from tests.soak.bound import upper_bound
from tests.soak.promises import PROMISES, Attempt, Promise
from tests.soak.sessions import WAYS, session, way_of

__all__ = ["main"]

STATE = ROOT / "build" / "soak.json"
_BAR = 30
_HISTORIES = "P8 reads are what the updates before them make, in every history of the others"
# So many sessions that break are replaced by others.
_BROKEN = 3
# A session that runs apart tells how many trials it has done this often, seconds.
_TELL_EVERY = 0.5


@dataclass
class Tally:
    """What came of one promise so far."""

    tried: int = 0
    violated: int = 0
    #: The seeds of the sessions that are over.
    seeds: list[int] = field(default_factory=list)
    #: How long these sessions took in all, several at once or not.
    seconds: float = 0.0
    slowest: float = 0.0
    #: The command for each session that failed.
    failures: list[str] = field(default_factory=list)
    #: Sessions that were late, as seed and trials: those to be tried again, and those that were in time then.
    late: list[tuple[int, int]] = field(default_factory=list)
    in_time: list[tuple[int, int]] = field(default_factory=list)
    #: Sessions that did not come to their end, as seed and trials.
    broken: list[tuple[int, int]] = field(default_factory=list)
    histories: int = 0
    wrong_histories: int = 0
    measured: list[str] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> int:
    """Try; the exit code is 1 where a promise was violated."""
    options = _parser().parse_args(arguments)
    names = options.promise or list(PROMISES)
    os.environ |= way_of(options.way)
    before = {number: signal.signal(number, _interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
    _own_directory()
    try:
        if not options.tell:
            _compile()
        if options.seed is not None:
            return _one(PROMISES[names[0]], options.seed, options.trials, options.tell)
        soak = _Soak(names, options.trials, options.way, {} if options.fresh else _load(options.way, options.keep))
        return soak.run(options.jobs)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        reap(marked(os.environ[MARK]))
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _one(promise: Promise, seed: int, trials: int | None, tells: bool) -> int:
    told = time.monotonic()
    done = 0

    def on_trial() -> None:
        nonlocal told, done
        done += 1
        if tells and time.monotonic() - told > _TELL_EVERY:
            told = time.monotonic()
            print(json.dumps({"done": done}), flush=True)

    attempt = promise.session(seed, trials or promise.per_session, on_trial)
    if tells:
        said = {name: getattr(attempt, name) for name in _SAID}
        print(json.dumps({"over": said}), flush=True)
    else:
        print(*attempt.measured, sep="\n", end="\n" * bool(attempt.measured))
        print(*(f"late: {line}" for line in attempt.late), sep="\n", end="\n" * bool(attempt.late))
        print("\n".join(attempt.violations) or f"{promise.name}: {attempt.tried} {promise.trial}, no violation")
    return bool(attempt.violations)


#: What a session that runs apart tells of its attempt.
_SAID = ("tried", "violations", "late", "histories", "wrong_histories", "measured", "slowest")


class _Broken(Exception):
    """A session did not come to its end."""


def _apart(promise: Promise, seed: int, trials: int, on_done: Callable[[int], None], soak: _Soak) -> Attempt | None:
    """Run a session as a process of its own; None where the soak was interrupted. Raises _Broken."""
    attempt = Attempt(seed, trials)
    with (
        subprocess.Popen(
            [sys.executable, "-m", "tests.soak.run", *_options_of(promise, seed, trials, soak.way), "--tell"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        ) as process,
        ThreadPoolExecutor(1) as errors,
    ):
        soak.processes.add(process)
        assert process.stdout is not None
        assert process.stderr is not None
        err = errors.submit(process.stderr.read)
        is_over = False
        for line in process.stdout:
            said: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
            if "done" in said:
                on_done(said["done"])
            for name, value in said.get("over", {}).items():
                setattr(attempt, name, value)
                is_over = True
        process.wait()
        soak.processes.discard(process)
    if soak.is_interrupted:
        return None
    if not is_over:
        raise _Broken(f"the session ended by {process.returncode}\n{err.result()[-4000:]}")
    return attempt


def _options_of(promise: Promise, seed: int, trials: int, way: str) -> list[str]:
    said = [] if way == "program" else ["--way", way]
    return ["--promise", promise.name, "--seed", str(seed), "--trials", str(trials), *said]


class _Soak:
    """Sessions, several at once. What they find is put together under a lock."""

    def __init__(self, names: list[str], trials: int | None, way: str, tallies: dict[str, Tally]) -> None:
        self._names = names
        self.way = way
        self._wanted = {name: PROMISES[name].long if trials is None else trials for name in names}
        self._tallies = {name: tallies.get(name, Tally()) for name in PROMISES}
        self._lock = threading.Lock()
        #: Of each session that runs its trials, and how many of them are done.
        self._running: dict[tuple[str, int], int] = {}
        self._done: Counter[tuple[str, int]] = Counter()
        self.processes: set[subprocess.Popen[str]] = set()
        self.is_interrupted = False

    def run(self, jobs: int) -> int:
        """Everything that is left to do; the exit code."""
        begun = time.monotonic()
        try:
            self._lanes(["nothing"])
            self._lanes([*["some"] * jobs, "all"])
            self._lanes(["again"])
        except KeyboardInterrupt:
            self.is_interrupted = True
        _clear()
        print(_table(self._tallies, self._names, self.way))
        minutes = (time.monotonic() - begun) / 60
        print(f"\n{minutes:.0f} minutes on {os.cpu_count()} processors, {jobs} sessions at once", file=sys.stderr)
        bad = any(self._tallies[name].violated or self._tallies[name].broken for name in self._names)
        return 128 + signal.SIGINT if self.is_interrupted else int(bad)

    def _lanes(self, beside: Sequence[str]) -> None:
        """Sessions at once, each lane with those that can have the same beside them."""
        with ThreadPoolExecutor(len(beside)) as lanes:
            try:
                for lane in [lanes.submit(self._lane, each) for each in beside]:
                    lane.result()
            except KeyboardInterrupt:
                self._interrupt()
                raise

    def _interrupt(self) -> None:
        self.is_interrupted = True
        for process in list(self.processes):
            process.terminate()

    def _lane(self, beside: str) -> None:
        while beside != "again" and (following := self._next(beside)) is not None:
            self._try(*following)
        for name in self._names if beside == "again" else []:
            for seed, trials in list(self._tallies[name].late):
                if not self.is_interrupted:
                    self._try(PROMISES[name], seed, trials, again=True)

    def _try(self, promise: Promise, seed: int, trials: int, *, again: bool = False) -> None:
        begun = time.monotonic()

        def on_done(done: int) -> None:
            self._done[promise.name, seed] = done
            self._show(promise)

        attempt, broken = None, ""
        try:
            attempt = _apart(promise, seed, trials, on_done, self)
        except _Broken as error:
            broken = str(error)
        with self._lock:
            self._running.pop((promise.name, seed), None)
            self._done.pop((promise.name, seed), None)
            if attempt is None and not broken:
                return  # interrupted
            tally = self._tallies[promise.name]
            tally.seconds += time.monotonic() - begun
            if again:
                tally.late.remove((seed, trials))
            if attempt is None:
                tally.broken.append((seed, trials))
                self._tell("NOT JUDGED", promise, seed, trials, [broken])
            else:
                self._judge(attempt, promise, trials, again)
            _save(self._tallies, self.way)
            if not sys.stderr.isatty():
                took = f"{promise.name}: {trials} {promise.trial} in {time.monotonic() - begun:.0f} s"
                print(f"{took}, {tally.tried} of {self._wanted[promise.name]}", file=sys.stderr)
        self._show(promise)

    def _judge(self, attempt: Attempt, promise: Promise, trials: int, again: bool) -> None:
        """Add what came of a session; tried again its trials are not counted once more."""
        tally, seed = self._tallies[promise.name], attempt.seed
        if not again:
            tally.seeds.append(seed)
            tally.tried += attempt.tried
            tally.measured += attempt.measured
            tally.histories += attempt.histories
            tally.slowest = max(tally.slowest, attempt.slowest)
        tally.wrong_histories += attempt.wrong_histories
        tally.commits += [_commit()] * (_commit() not in tally.commits)
        if attempt.violations or (again and attempt.late):
            tally.violated += 1
            tally.failures.append(_command(promise, seed, trials, self.way))
            self._tell("VIOLATED", promise, seed, trials, attempt.violations or attempt.late)
        elif again:
            tally.in_time.append((seed, trials))
        elif attempt.late:
            tally.late.append((seed, trials))
            self._tell("LATE, to be tried again", promise, seed, trials, attempt.late)

    def _tell(self, what: str, promise: Promise, seed: int, trials: int, lines: Sequence[str]) -> None:
        _clear()
        print(f"{what}: {_command(promise, seed, trials, self.way)}", *lines, sep="\n", flush=True)

    def _next(self, beside: str) -> tuple[Promise, int, int] | None:
        """A session of the promise of which the least is done: interrupted, something is known of each."""
        names = [name for name in self._names if PROMISES[name].beside == beside]
        if not names:
            return None
        with self._lock:
            given = Counter({name: self._tallies[name].tried for name in names})
            for (name, _), trials in self._running.items():
                given[name] += trials
            for name in names:  # what breaks is tried a few times more, and not for ever
                given[name] += max(0, len(self._tallies[name].broken) - _BROKEN) * self._wanted[name]
            name = min(names, key=lambda name: given[name] / self._wanted[name])
            promise, left = PROMISES[name], self._wanted[name] - given[name]
            if left <= 0 or self.is_interrupted:
                return None
            tally = self._tallies[name]
            used = [*tally.seeds, *(seed for seed, _ in tally.broken)]
            seed = next(n for n in count() if n not in used and (name, n) not in self._running)
            trials = self._running[name, seed] = min(promise.per_session, left)
            return promise, seed, trials

    def _show(self, promise: Promise) -> None:
        tally = self._tallies[promise.name]
        under_way = sum(done for (name, _), done in list(self._done.items()) if name == promise.name)
        _bar(promise, tally.tried + under_way, self._wanted[promise.name], tally)


def _command(promise: Promise, seed: int, trials: int, way: str) -> str:
    return " ".join(["python -m tests.soak.run", *_options_of(promise, seed, trials, way)])


def _bar(promise: Promise, done: int, wanted: int, tally: Tally) -> None:
    if sys.stderr.isatty():
        filled = _BAR * min(done, wanted) // wanted
        bar = "#" * filled + "." * (_BAR - filled)
        print(
            f"\r{promise.name:4} [{bar}] {done} of {wanted} {promise.trial}, {tally.violated} violated ",
            end="",
            file=sys.stderr,
        )


def _clear() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)


def _table(tallies: Mapping[str, Tally], names: list[str], way: str) -> str:
    """One line a promise, and one for the histories of all; violated sessions count as one violation each, whatever
    went wrong in them. ``took`` is the time of all sessions together, of which several run at once."""
    rows = [("promise", "tried", "violated", "late", "rate below (95 %)", "longest halt", "took", "at commit")]
    for name in names:
        promise, tally = PROMISES[name], tallies[name]
        rows.append(
            (
                f"{name} {promise.text}",
                f"{tally.tried:,} {promise.trial}",
                str(tally.violated),
                str(len(tally.late) + len(tally.in_time)),
                f"{upper_bound(tally.violated, tally.tried):.2%}" if tally.tried else "-",
                f"{tally.slowest:.1f} s" if tally.slowest else "-",
                f"{tally.seconds / 60:.0f} min",
                ", ".join(tally.commits),
            )
        )
    if histories := sum(tallies[name].histories for name in names):
        wrong = sum(tallies[name].wrong_histories for name in names)
        commits = dict.fromkeys(commit for name in names if tallies[name].histories for commit in tallies[name].commits)
        bound = f"{upper_bound(wrong, histories):.2%}"
        row = (_HISTORIES, f"{histories:,} histories", str(wrong), "-", bound, "-", "-", ", ".join(commits))
        rows.insert(1 + sum(int(name[1:].partition("-")[0]) < 8 for name in names), row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rows.insert(1, tuple("-" * width for width in widths))
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    for name in names:
        promise, tally = PROMISES[name], tallies[name]
        lines += tally.measured
        lines += [f"violated: {command}" for command in tally.failures]
        lines += [f"late, and not tried again yet: {_command(promise, *session, way)}" for session in tally.late]
        lines += [
            f"late, and in time when tried again alone: {_command(promise, *session, way)}" for session in tally.in_time
        ]
        lines += [
            f"did not come to its end, and counts for nothing: {_command(promise, *it, way)}" for it in tally.broken
        ]
    return "\n".join(lines)


def _code() -> str:
    """What the packages are, as a digest."""
    digest = hashlib.sha256()
    for role in ("proto", "server", "worker", "client"):
        for path in sorted((ROOT / role).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _commit() -> str:
    """The commit that is checked out, with a ``+`` where files differ from it; "" where nobody knows."""
    asked = ("git", "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*")
    try:
        said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return said.stdout.strip()


def _state(way: str) -> Path:
    return STATE if way == "program" else STATE.with_stem(f"{STATE.stem}-{way}")


def _load(way: str, keeps: bool) -> dict[str, Tally]:
    if not _state(way).exists():
        return {}
    state = json.loads(_state(way).read_text())
    if state["code"] != _code() and not keeps:
        print("the packages have changed since the last trials: beginning anew", file=sys.stderr)
        return {}
    tallies = {name: Tally(**tally) for name, tally in state["tallies"].items()}
    for tally in tallies.values():
        tally.late = [(seed, trials) for seed, trials in tally.late]
        tally.in_time = [(seed, trials) for seed, trials in tally.in_time]
        tally.broken = []  # another try
    return tallies


def _save(tallies: Mapping[str, Tally], way: str) -> None:
    path = _state(way)
    path.parent.mkdir(exist_ok=True)
    text = json.dumps({"code": _code(), "tallies": {name: asdict(tally) for name, tally in tallies.items()}}, indent=1)
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


def _own_directory() -> None:
    """A private place for run directories and temporary files, and a mark by which everything started is known."""
    directory = Path(tempfile.mkdtemp(prefix="css-"))
    (directory / "run").mkdir(mode=0o700)
    os.environ["XDG_RUNTIME_DIR"] = str(directory / "run")
    os.environ["TMPDIR"] = str(directory)
    # Of a session that another has started everything is known by that one's mark, too.
    os.environ[MARK] = "/".join([*filter(None, [os.environ.get(MARK)]), f"{os.getpid()}-{secrets.token_hex(3)}"])
    tempfile.tempdir = None  # asked for once and remembered: ask again


def _compile() -> None:
    """Have the kernels compiled that the training needs, before anything is timed: anew, that takes up to a minute."""
    program = "from cs_server.compute import kernels; kernels.cache_directory() and kernels.load()"
    subprocess.run([sys.executable, "-c", program], check=True)
    with session("--elements", "1024") as trained:
        trained.wait_for_steps(1, patience=600.0)
        trained.finish()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tests.soak.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--promise", action="append", choices=list(PROMISES), help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, help="one session of the first promise named")
    parser.add_argument("--trials", type=int, help="of each promise, or of the session")
    parser.add_argument("--way", choices=list(WAYS), default="program", help="how steps go (default: program)")
    parser.add_argument("--jobs", type=int, default=(os.cpu_count() or 1) + 1, help="sessions at once")
    parser.add_argument("--keep", action="store_true", help="go on although the packages have changed")
    parser.add_argument("--tell", action="store_true", help=argparse.SUPPRESS)  # what is done, as lines of JSON
    parser.add_argument("--fresh", action="store_true", help="forget what was done before")
    return parser


if __name__ == "__main__":
    sys.exit(main())
