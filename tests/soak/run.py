"""``make soak``: every promise tried thousands of times, and a table of what came of it.

    python -m tests.soak.run                                  everything; goes on where it was interrupted
    python -m tests.soak.run --promise P1 --promise P2        some of it
    python -m tests.soak.run --promise P1 --seed 17 --trials 20   one session, which is how a failure is looked at

What has been done is in ``build/soak.json``, and belongs to the code it was done with: after a change of the packages
it begins anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.harness.processes import MARK, ROOT, marked, reap
from tests.soak.bound import upper_bound
from tests.soak.promises import PROMISES, Promise

__all__ = ["main"]

STATE = ROOT / "build" / "soak.json"
_BAR = 30


@dataclass
class Tally:
    """What came of one promise so far."""

    tried: int = 0
    violated: int = 0
    sessions: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    #: The command for each session that failed.
    failures: list[str] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> int:
    """Try; the exit code is 1 where a promise was violated."""
    options = _parser().parse_args(arguments)
    names = options.promise or list(PROMISES)
    _own_directory()
    try:
        _compile()
        if options.seed is not None:
            return _one(PROMISES[names[0]], options.seed, options.trials)
        return _all(names, options.trials, options.fresh)
    finally:
        reap(marked(os.environ[MARK]))
        shutil.rmtree(os.environ["TMPDIR"])


def _one(promise: Promise, seed: int, trials: int | None) -> int:
    attempt = promise.session(seed, trials or promise.per_session)
    print("\n".join(attempt.violations) or f"{promise.name}: {attempt.tried} {promise.trial}, no violation")
    return bool(attempt.violations)


def _all(names: list[str], trials: int | None, fresh: bool) -> int:
    tallies = {} if fresh else _load()
    tallies = {name: tallies.get(name, Tally()) for name in PROMISES}
    for name in names:
        promise, tally = PROMISES[name], tallies[name]
        wanted = promise.long if trials is None else trials
        while tally.tried < wanted:
            _session(promise, tally, wanted)
            _save(tallies)
    print(_table(tallies, names))
    return any(tallies[name].violated for name in names)


def _session(promise: Promise, tally: Tally, wanted: int) -> None:
    seed, trials = tally.sessions, min(promise.per_session, wanted - tally.tried)
    begun, done = time.monotonic(), tally.tried

    def show() -> None:
        nonlocal done
        done += 1
        _bar(promise, done, wanted, tally)

    _bar(promise, done, wanted, tally)
    attempt = promise.session(seed, trials, show)
    tally.sessions += 1
    tally.tried += attempt.tried
    tally.seconds += time.monotonic() - begun
    tally.slowest = max(tally.slowest, attempt.slowest)
    if attempt.violations:
        tally.violated += 1
        command = f"python -m tests.soak.run --promise {promise.name} --seed {seed} --trials {trials}"
        tally.failures.append(command)
        _clear()
        print(f"VIOLATED: {command}", *attempt.violations, sep="\n", flush=True)
    _bar(promise, tally.tried, wanted, tally)


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
    """One line a promise; violated sessions count as one violation each, whatever went wrong in them."""
    rows = [("promise", "", "tried", "violated", "rate below (95 %)", "longest halt", "took")]
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
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rows.insert(1, tuple("-" * width for width in widths))
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
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


def _load() -> dict[str, Tally]:
    if not STATE.exists():
        return {}
    state = json.loads(STATE.read_text())
    if state["code"] != _code():
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
    os.environ[MARK] = f"{os.getpid()}-{secrets.token_hex(3)}"
    tempfile.tempdir = None  # asked for once and remembered: ask again


def _compile() -> None:
    """Have the server's kernels compiled before anything is timed: anew, that takes up to a minute."""
    program = "from cs_server import kernels; kernels.cache_directory() and kernels.load()"
    subprocess.run([sys.executable, "-c", program], check=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tests.soak.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--promise", action="append", choices=list(PROMISES), help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, help="one session of the first promise named")
    parser.add_argument("--trials", type=int, help="of each promise, or of the session")
    parser.add_argument("--fresh", action="store_true", help="forget what was done before")
    return parser


if __name__ == "__main__":
    sys.exit(main())
