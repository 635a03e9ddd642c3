"""``make soak``: every promise tried thousands of times, and a table of what came of it.

    python -m tests.soak.run                                  everything; goes on where it was interrupted
    python -m tests.soak.run --promise P1 --promise P2        some of it
    python -m tests.soak.run --promise P1 --seed 17 --trials 20   one session, which is how a failure is looked at

Sessions run apart, each by the last of these commands, as many at once as there are processors. What has been done is
in ``build/soak.json``, and belongs to the code it was done with: after a change of the packages it begins anew, unless
``--keep`` says that the change does not matter. The table names the commits.
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
from collections.abc import Callable, Mapping
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
from tests.soak.sessions import session

__all__ = ["main"]

STATE = ROOT / "build" / "soak.json"
_BAR = 30
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
    measured: list[str] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> int:
    """Try; the exit code is 1 where a promise was violated."""
    options = _parser().parse_args(arguments)
    names = options.promise or list(PROMISES)
    before = {number: signal.signal(number, _interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
    _own_directory()
    try:
        if not options.tell:
            _compile()
        if options.seed is not None:
            return _one(PROMISES[names[0]], options.seed, options.trials, options.tell)
        soak = _Soak(names, options.trials, {} if options.fresh else _load(options.keep))
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
        print("\n".join(attempt.violations) or f"{promise.name}: {attempt.tried} {promise.trial}, no violation")
    return bool(attempt.violations)


#: What a session that runs apart tells of its attempt.
_SAID = ("tried", "violations", "measured", "slowest")


def _apart(promise: Promise, seed: int, trials: int, on_done: Callable[[int], None], soak: _Soak) -> Attempt | None:
    """Run a session as a process of its own; None where the soak was interrupted."""
    attempt = Attempt(seed, trials)
    with (
        subprocess.Popen(
            [sys.executable, "-m", "tests.soak.run", *_options_of(promise, seed, trials), "--tell"],
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
        attempt.tried = 1
        attempt.violations = [f"the session ended by {process.returncode}\n{err.result()[-4000:]}"]
    return attempt


def _options_of(promise: Promise, seed: int, trials: int) -> list[str]:
    return ["--promise", promise.name, "--seed", str(seed), "--trials", str(trials)]


class _Soak:
    """Sessions, several at once. What they find is put together under a lock."""

    def __init__(self, names: list[str], trials: int | None, tallies: dict[str, Tally]) -> None:
        self._names = names
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
        with ThreadPoolExecutor(jobs) as lanes:
            try:
                for lane in [lanes.submit(self._lane) for _ in range(jobs)]:
                    lane.result()
            except KeyboardInterrupt:
                self.is_interrupted = True
                for process in list(self.processes):
                    process.terminate()
        print(_table(self._tallies, self._names))
        violated = any(self._tallies[name].violated for name in self._names)
        return 128 + signal.SIGINT if self.is_interrupted else int(violated)

    def _lane(self) -> None:
        while (following := self._next()) is not None:
            promise, seed, trials = following
            begun = time.monotonic()

            def on_done(done: int, key: tuple[str, int] = (promise.name, seed)) -> None:
                self._done[key] = done
                self._show(PROMISES[key[0]])

            attempt = _apart(promise, seed, trials, on_done, self)
            if attempt is not None:
                self._add(promise, attempt, time.monotonic() - begun)

    def _next(self) -> tuple[Promise, int, int] | None:
        """A session of the promise of which the least is done: interrupted, something is known of each."""
        with self._lock:
            given = Counter({name: self._tallies[name].tried for name in self._names})
            for (name, _), trials in self._running.items():
                given[name] += trials
            name = min(self._names, key=lambda name: given[name] / self._wanted[name])
            promise, left = PROMISES[name], self._wanted[name] - given[name]
            if left <= 0 or self.is_interrupted:
                return None
            used = self._tallies[name].seeds
            seed = next(n for n in count() if n not in used and (name, n) not in self._running)
            trials = self._running[name, seed] = min(promise.per_session, left)
            return promise, seed, trials

    def _add(self, promise: Promise, attempt: Attempt, seconds: float) -> None:
        with self._lock:
            tally, trials = self._tallies[promise.name], self._running.pop((promise.name, attempt.seed))
            self._done.pop((promise.name, attempt.seed), None)
            tally.seeds.append(attempt.seed)
            tally.tried += attempt.tried
            tally.seconds += seconds
            tally.slowest = max(tally.slowest, attempt.slowest)
            tally.measured += attempt.measured
            tally.commits += [_commit()] * (_commit() not in tally.commits)
            if attempt.violations:
                tally.violated += 1
                command = " ".join(["python -m tests.soak.run", *_options_of(promise, attempt.seed, trials)])
                tally.failures.append(command)
                _clear()
                print(f"VIOLATED: {command}", *attempt.violations, sep="\n", flush=True)
            _save(self._tallies)
        self._show(promise)

    def _show(self, promise: Promise) -> None:
        tally = self._tallies[promise.name]
        under_way = sum(done for (name, _), done in list(self._done.items()) if name == promise.name)
        _bar(promise, tally.tried + under_way, self._wanted[promise.name], tally)


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


def _table(tallies: Mapping[str, Tally], names: list[str]) -> str:
    """One line a promise; violated sessions count as one violation each, whatever went wrong in them. ``took`` is the
    time of all sessions together, of which several run at once."""
    rows = [("promise", "", "tried", "violated", "rate below (95 %)", "longest halt", "took", "at")]
    for name in names:
        promise, tally = PROMISES[name], tallies[name]
        rows.append(
            (
                name,
                promise.text,
                f"{tally.tried} {promise.trial}",
                str(tally.violated),
                f"{upper_bound(tally.violated, tally.tried):.2%}" if tally.tried else "-",
                f"{tally.slowest:.1f} s" if tally.slowest else "-",
                f"{tally.seconds / 60:.0f} min",
                " ".join(tally.commits),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rows.insert(1, tuple("-" * width for width in widths))
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines += [line for name in names for line in tallies[name].measured]
    failures = [f"violated: {command}" for name in names for command in tallies[name].failures]
    _clear()
    return "\n".join([*lines, *failures])


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


def _load(keeps: bool) -> dict[str, Tally]:
    if not STATE.exists():
        return {}
    state = json.loads(STATE.read_text())
    if state["code"] != _code() and not keeps:
        print("the packages have changed since the last trials: beginning anew", file=sys.stderr)
        return {}
    return {name: Tally(**tally) for name, tally in state["tallies"].items()}


def _save(tallies: Mapping[str, Tally]) -> None:
    STATE.parent.mkdir(exist_ok=True)
    text = json.dumps({"code": _code(), "tallies": {name: asdict(tally) for name, tally in tallies.items()}}, indent=1)
    fresh = STATE.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(STATE)


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
    program = "from cs_server import kernels; kernels.cache_directory() and kernels.load()"  # without which none starts
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
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="sessions at once")
    parser.add_argument("--keep", action="store_true", help="go on although the packages have changed")
    parser.add_argument("--tell", action="store_true", help=argparse.SUPPRESS)  # what is done, as lines of JSON
    parser.add_argument("--fresh", action="store_true", help="forget what was done before")
    return parser


if __name__ == "__main__":
    sys.exit(main())
