"""Segmentation faults: a write in place is named, everything else ends as ever, and nothing hangs."""

from __future__ import annotations

import ctypes
import signal
import sys
from types import SimpleNamespace

import pytest
from tests.harness.processes import Ended, run
from tests.harness.timing import unit

from cs_proto.arrays import Location
from cs_proto.messages import Variable, VariableSpec
from cs_worker.devices import faults
from cs_worker.devices.device import open_device
from cs_worker.execution.catalogue import Catalogue

pytestmark = [
    pytest.mark.long,  # processes die
    pytest.mark.skipif(sys.version_info >= (3, 14), reason="no handler can name the write from Python 3.14 on"),
]

SETTING = """
import ctypes, faulthandler, os, signal, sys, threading
import numpy as np
from cs_proto.arrays import Array, Location
from cs_runtime.shared_memory.mapping import Mapping
from cs_worker.devices.faults import name_faults

NBYTES = 1 << 20
file = os.memfd_create("segment")
os.ftruncate(file, NBYTES)
if {enabled}:
    faulthandler.enable()
name_faults(lambda segment, offset: f"byte {{offset}} of {{segment}}")
mapping = Mapping("inputs", os.open(f"/proc/self/fd/{{file}}", os.O_RDONLY), NBYTES, writable=False)
view = mapping.view(Array("uint8", (NBYTES - 4096,), Location("inputs", 4096)))
del mapping  # what is viewed is known all the same

def write(start=0):
    ctypes.memset(view.__array_interface__["data"][0] + start, 1, 8)

def crash():
    os.kill(os.getpid(), signal.SIGSEGV)

def in_threads(count):
    together = threading.Barrier(count)
    def body(number):
        together.wait()
        write(number * 4096)
    threads = [threading.Thread(target=body, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

def in_a_child():
    if os.fork() == 0:
        write()
    _, status = os.wait()
    print("child ended by", os.waitstatus_to_exitcode(status))

{deed}
"""
NAMED = "SIGSEGV: something wrote in place to byte {} of inputs, which a replica may only read; write to a copy: "
STACKS = "Fatal Python error: Segmentation fault"


def after(deed: str, *, enabled: bool = True) -> Ended:
    return run(sys.executable, "-c", SETTING.format(deed=deed, enabled=enabled), timeout=unit(30))


@pytest.mark.parametrize(("deed", "offset"), [("write()", 4096), ("write(NBYTES - 4104)", (1 << 20) - 8)])
def test_a_write_in_place_is_named_behind_the_stacks(deed: str, offset: int) -> None:
    ended = after(deed)
    assert ended.code == -signal.SIGSEGV, ended
    lines = ended.err.splitlines()
    assert lines[0] == STACKS
    assert "in write" in ended.err
    assert lines[-1].startswith(NAMED.format(offset)), ended
    assert ended.err.count("wrote in place") == 1


def test_threads_that_fault_together_are_named_once_behind_the_stacks() -> None:
    """faulthandler may stop in the stack of a thread that runs on meanwhile, so not all stacks are always there."""
    ended = after("in_threads(8)")
    assert ended.code == -signal.SIGSEGV, ended
    assert "wrote in place" in ended.err.splitlines()[-1], ended
    assert ended.err.count("wrote in place") == 1
    assert ended.err.splitlines()[0] == STACKS


@pytest.mark.parametrize(("code", "waits"), [(1, [1.0, 1.0]), (-6, [])])
def test_a_fault_of_faulthandler_lets_another_thread_name_its_own(
    monkeypatch: pytest.MonkeyPatch, code: int, waits: list[float]
) -> None:
    """It faults in the stack of a thread that runs on, at an address that says nothing."""
    waited: list[float] = []
    ended: list[int] = []
    libc = SimpleNamespace(signal=lambda *_: None, **{"raise": ended.append})
    monkeypatch.setattr(faults, "_libc", libc)
    monkeypatch.setattr(faults.time, "sleep", waited.append)
    information, context = (ctypes.c_int * 4)(0, 0, code, 0), (ctypes.c_uint64 * 64)()
    name = faults._Namer(lambda segment, offset: "never", 216)
    name(signal.SIGSEGV, ctypes.addressof(information), ctypes.addressof(context))
    assert waited == waits
    assert ended == [signal.SIGSEGV]


def test_without_faulthandler_it_is_named_all_the_same() -> None:
    ended = after("write()", enabled=False)
    assert ended.code == -signal.SIGSEGV, ended
    assert ended.err.strip().startswith(NAMED.format(4096))
    assert ended.err.count("\n") == 2


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("deed", ["ctypes.memset(0, 1, 8)", "ctypes.string_at(8)", "crash()"])
def test_any_other_is_not(deed: str, enabled: bool) -> None:
    ended = after(f"{deed}\nprint('alive')", enabled=enabled)
    assert ended.code == -signal.SIGSEGV, ended
    assert "in place" not in ended.err
    assert (STACKS in ended.err) == enabled
    assert ended.out == ""


def test_a_write_to_what_is_no_longer_mapped_is_not() -> None:
    ended = after("address = view.__array_interface__['data'][0]; del view; ctypes.memset(address, 1, 8)")
    assert ended.code == -signal.SIGSEGV, ended
    assert "in place" not in ended.err


def test_an_overflow_of_the_stack_ends_it_as_ever() -> None:
    deep = "def sink(value): return sorted([value], key=sink)"
    ended = after(f"sys.setrecursionlimit(1 << 30)\n{deep}\nsink(1)")
    assert ended.code == -signal.SIGSEGV, ended
    assert STACKS in ended.err
    assert "in place" not in ended.err


def test_a_fault_inside_malloc_ends_it_as_ever() -> None:
    """Where the C library's lock is held, which the handler must not wait for."""
    deed = """
threading.Thread(target=threading.Event().wait, daemon=True).start()  # with one thread there is no lock
libc = ctypes.PyDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = (ctypes.c_void_p,)
places = [libc.malloc(100) for _ in range(60)]
for place in places[:40]:
    libc.free(place)
for place in places[8:40]:  # the first of them are kept elsewhere
    ctypes.c_uint64.from_address(place).value = (place >> 12) ^ 0x5141414141410
for place in places:
    libc.malloc(100)
"""
    ended = after(deed)
    assert ended.code in (-signal.SIGSEGV, -signal.SIGABRT), ended  # glibc itself aborts where it notices
    assert "Fatal Python error" in ended.err
    assert "in place" not in ended.err


def test_a_child_that_was_forked_names_its_own() -> None:
    ended = after("in_a_child()").ok()
    assert ended.lines == [f"child ended by {-signal.SIGSEGV}"]
    assert NAMED.format(4096) in ended.err


def test_a_fault_behind_the_interpreter_s_end_ends_it_as_ever() -> None:
    last = "libc = ctypes.CDLL(None); libc.on_exit(ctypes.cast(libc.strlen, ctypes.c_void_p), None)"
    ended = after(f"{last}\nsys.exit(8)")  # strlen(8)
    assert ended.code == -signal.SIGSEGV, ended
    assert ended.err == ""


def test_what_lies_where() -> None:
    catalogue = Catalogue(None, None, 0, open_device("cpu:0"), "cpu:0")  # type: ignore[arg-type]
    for number, (name, shape) in enumerate({"w": (2, 3), "n" * 500: ()}.items(), 1):
        spec = VariableSpec(name, "float32", shape, True, 0, 0, False)
        catalogue.learn(Variable(number, spec, Location("parameters/float32", 64 * number), 0))
    found = [catalogue.what_lies_at("parameters/float32", offset) for offset in (63, 64, 87, 88, 128, 132)]
    unknown, w, long = "a variable", "variable 'w' (float32[2, 3])", f"variable '{'n' * 100}' (float32[])"
    assert found == [unknown, w, w, unknown, long, unknown]
    assert catalogue.what_lies_at("parameters/float64", 64) == unknown
    for arena in ("inputs", "arena/controller", "arena/1"):
        assert catalogue.what_lies_at(arena, 64) == "an argument of the replica function"
