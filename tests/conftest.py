"""What holds for every test: nothing is left behind, a hang ends with stacks, a failure shows the logs of all roles.

Each test session (under xdist each of its workers) has a directory and a mark of its own, so sessions beside each
other on one machine do not see each other, and socket paths stay short.
"""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import hypothesis
import numpy as np
import pytest
import zmq
from _pytest.doctest import DoctestItem, DoctestModule
from tests.harness import leftovers
from tests.harness.inet import Watch
from tests.harness.processes import MARK
from tests.harness.timing import unit

from central_storage.diagnostics.logging_setup import configure_logging
from cs_runtime import stacks

#: Compiled modules are kept, as for users, whatever this environment says: else every process compiles all it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

#: As in pyproject.toml, but for a slow machine, where CS_TEST_TIME_UNIT makes every limit longer.
os.environ.setdefault("PYTEST_TIMEOUT", str(unit(180)))

#: What has a command of its own that brings what it needs: make test-containers, test-pythons, test-interop,
#: test-tools, test-ray.
collect_ignore = [] if "CS_IMAGE" in os.environ else ["containers"]
collect_ignore += [] if "CS_PYTHONS" in os.environ else ["pythons"]
collect_ignore += [] if "CS_CHROMIUM" in os.environ else ["tools"]
collect_ignore += ["harness/cupy_stand_in"]  # a package of its own: it is imported as cupy or not at all
collect_ignore += [] if importlib.util.find_spec("torch") else ["interop"]
collect_ignore += [] if importlib.util.find_spec("ray") else ["ray"]

# The profiles of hypothesis, for --hypothesis-profile: quick by default; sample tries a fifth as many examples and full
# ten times as many. These three try the same examples every time, or a commit would fail for what an older one did;
# explore looks for new ones.
# How long an input takes to draw is no fault of a test: the first of a process reads all modules for their constants.
for name, examples, is_same in (
    ("sample", 20, True),
    ("quick", 100, True),
    ("full", 1000, True),
    ("explore", 1000, False),
):
    slow = hypothesis.HealthCheck.too_slow  # as a busy machine is: no test asserts a time
    hypothesis.settings.register_profile(
        name, max_examples=examples, derandomize=is_same, deadline=None, suppress_health_check=[slow]
    )
hypothesis.settings.load_profile("quick")

_directory = pytest.StashKey[Path]()
_failed = pytest.StashKey[bool]()
_watch = pytest.StashKey[Watch]()
_collecting = pytest.StashKey[TextIO]()
_LOG_LINES = 40
#: The fixtures in the folders of ``make check`` that start a service, or stand-ins for one.
_STARTS_PROCESSES = {"standins", "world"}
#: The places of tests that start servers or run updates.
_NEEDS_KERNELS = (
    "conformance",
    "containers",
    "interop",
    "processes",
    "ray",
    "seeds",
    "server/compute",
    "server/test_service.py",
)
#: The places of files whose tests start many processes or carry out thousands of steps.
_TAKE_LONGEST = (
    "tests/processes/",
    "tests/server/engine/",
    "tests/server/compute/",
    "tests/model/",
    "tests/interop/",
    "tests/ray/test_placement.py",
    "tests/ray/test_train.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Give this session its directory and its mark; everything it starts inherits both."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what it runs behind; Ctrl-C is tested
        signal.signal(signal.SIGINT, signal.default_int_handler)
    directory = Path(tempfile.mkdtemp(prefix="cst-"))
    config.stash[_directory] = directory
    for name in ("run", "tmp", "logs"):
        (directory / name).mkdir(mode=0o700)
    os.environ["XDG_RUNTIME_DIR"] = str(directory / "run")
    os.environ["TMPDIR"] = str(directory / "tmp")
    os.environ["CS_LOG_DIR"] = os.environ["CS_MESSAGES_DIR"] = str(directory / "logs")
    # Whoever imports NumPy starts its threads, which takes longer than what tests multiply.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ[MARK] = f"{os.getpid()}-{secrets.token_hex(3)}"
    tempfile.tempdir = None  # asked for once and remembered: ask again
    # These open their files here rather than in the first test, which would leave them behind.
    configure_logging("script")
    stacks.keep_ready()
    if config.getoption("dist", "no") == "no":  # otherwise the workers of xdist run the tests, and look themselves
        config.stash[_watch] = Watch(os.environ[MARK])


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the session's directory."""
    if _watch in config.stash:
        config.stash[_watch].close()
    shutil.rmtree(config.stash[_directory], ignore_errors=True)


def pytest_report_header() -> list[str]:
    """The versions that decide, and what this machine has."""
    gpu = why_no_gpu()
    return [
        f"python {platform.python_version()}, numpy {np.__version__}, pyzmq {zmq.__version__} over libzmq "
        f"{zmq.zmq_version()}, {os.cpu_count()} CPUs, GPU: {gpu or 'yes'}, time unit {unit():g} s"
    ]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Let the first worker of xdist import everything before the others do. They find compiled what it has compiled:
    all at once each would compile all of it, on a machine that has run no test."""
    if hasattr(session.config, "workerinput"):
        # In the directory of the session that has started the workers, which all of them inherit.
        file = session.config.stash[_collecting] = (session.config.stash[_directory].parent / "collecting").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)
    try:
        return (yield)
    finally:
        _let_others_collect(session.config)  # also if there is no such file to collect


def _let_others_collect(config: pytest.Config) -> None:
    if _collecting in config.stash:
        config.stash[_collecting].close()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples only where there are any: to go through what a module defines takes as long as to import it."""
    collectors = yield
    if file_path.suffix == ".py" and ">>> " not in file_path.read_text():
        return [collector for collector in collectors if not isinstance(collector, DoctestModule)]
    return collectors


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Have the server's kernels compiled before the time of a test begins to run: on a machine that has none of them,
    or after a change of them, that takes up to three minutes, and longer where others compute. Each worker of xdist
    does its share; the first test begins when all are ready."""
    gc.freeze()  # what is collected stays: each look through it for garbage is a quarter of a second
    here = Path(__file__).parent
    paths = {str(item.path.relative_to(here)) for item in session.items if item.path.is_relative_to(here)}
    if session.config.option.collectonly or not any(path.startswith(_NEEDS_KERNELS) for path in paths):
        return
    worker = getattr(session.config, "workerinput", {"workerid": "gw0", "workercount": 1})
    share = (int(worker["workerid"].removeprefix("gw")), int(worker["workercount"]))
    program = f"from cs_server.compute import kernels; kernels.cache_directory() and kernels.load(share={share})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    subprocess.run([sys.executable, "-c", program], env=environment, timeout=900, check=True)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that start a service as long. Skip those that need a GPU, with the reason, where there is none.
    Put the files that take longest first: xdist gives a whole file to one worker, and in the end the others wait."""
    for item in items:
        is_example = isinstance(item, DoctestItem) and "in_process" in item.dtest.docstring
        if is_example or _STARTS_PROCESSES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.long)
    _let_others_collect(config)
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_gpu() if wanted else None
    if reason:
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=lambda item: not item.nodeid.startswith(_TAKE_LONGEST))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note that a test failed, and add the last messages and the last lines of every process since it began."""
    report = yield
    if report.failed:
        item.stash[_failed] = True
        with suppress(OSError):  # a test may have left no descriptor
            for path in sorted(item.config.stash[_directory].glob("logs/**/*")):
                if path.is_file() and path.stat().st_size and path.stat().st_mtime >= call.start:
                    lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
                    report.sections.append((f"log {path.name}", "\n".join(lines)))
    return report


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that passes but leaves a process, thread, descriptor, run directory or shared memory fails. So does one in
    which a process of a service has had an inet socket."""
    before = leftovers.take()
    yield
    sockets = request.config.stash[_watch].found()
    left = leftovers.since(before)
    if left:
        text = str(left)
        left.end()
        if not request.node.stash.get(_failed, False):
            pytest.fail(f"the test left behind:\n{text}", pytrace=False)
    if sockets and not request.node.stash.get(_failed, False):
        pytest.fail("\n".join(["processes of a service have inet sockets:", *sockets]), pytrace=False)


def why_no_gpu() -> str | None:
    """The reason for skipping the tests that need a GPU; None if there is one."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"
    return None if count else "no CUDA device"
