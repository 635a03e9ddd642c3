"""What cannot be sent is named: the smallest part, how it is reached, and what to do instead."""

import asyncio
import concurrent.futures
import io
import itertools
import os
import re
import socket
import sqlite3
import subprocess
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from central_storage.core.handles import Handle
from central_storage.pickling.pickler import dump_arguments, dump_function
from central_storage.pickling.unpicklable import is_unsendable
from cs_proto.errors import ShippingError, ShutdownError


class Weight(Handle):
    def _cs_handle(self) -> tuple[str, int]:
        return ("variable", 3)


def adopt(handle: Handle) -> tuple[str, int]:
    return handle._cs_handle()


def refusal(function: Callable[..., Any]) -> str:
    with pytest.raises(ShippingError) as caught:
        dump_function(function, adopt)
    assert isinstance(caught.value, TypeError)
    assert caught.value.__cause__ is not None
    return str(caught.value)


def refusal_of_arguments(*args: Any, **kwargs: Any) -> str:
    def place(data: memoryview) -> Any:
        raise AssertionError("nothing is placed")

    with pytest.raises(ShippingError) as caught:
        dump_arguments(args, kwargs, adopt, place)
    return str(caught.value)


def numbers() -> Iterator[int]:
    yield 1


def opened(name: str, mode: str, buffering: int = -1) -> Any:
    return open(name, mode, buffering)


def close(stream: io.IOBase) -> None:
    stream.close()


async def later() -> None: ...


LOCAL = threading.local()
LOCAL.x = 1

# A maker of the thing, how it is done away with, what the error says it is, and what it says to do.
UNSENDABLE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any] | None, str, str]] = {
    "written file": (lambda: opened(os.devnull, "w"), close, "an open file, _io.TextIOWrapper", "open it inside"),
    "read file": (lambda: opened(__file__, "r"), close, "an open file, _io.TextIOWrapper", "open it inside"),
    "raw file": (lambda: opened(__file__, "rb", 0), close, "an open file, _io.FileIO", "pass its data"),
    "generator": (numbers, None, "a running generator", "pass what it yields"),
    "coroutine": (later, types.CoroutineType.close, "a running generator, coroutine", "pass what it yields"),
    "list iterator": (lambda: iter([1]), None, "a running iterator, list_iterator", "pass its elements"),
    "map": (lambda: map(abs, [1]), None, "a running iterator, map", "pass its elements"),
    "zip": (lambda: zip([1], [2], strict=True), None, "a running iterator, zip", "pass its elements"),
    "count": (itertools.count, None, "a running iterator, itertools.count", "begins at its current position"),
    "lock": (threading.Lock, None, "a lock, _thread.lock", "make it inside"),
    "rlock": (threading.RLock, None, "a lock, _thread.RLock", "make it inside"),
    "condition": (threading.Condition, None, "a lock, threading.Condition", "make it inside"),
    "event": (threading.Event, None, "a lock, threading.Event", "make it inside"),
    "thread": (lambda: threading.Thread(target=print), None, "a thread, threading.Thread", "start it inside"),
    "thread-local": (lambda: LOCAL, None, "thread-local data, _thread._local", "pass the values"),
    "socket": (socket.socket, socket.socket.close, "a socket, socket.socket", "connect inside"),
    "process": (
        lambda: subprocess.Popen(["true"]),
        subprocess.Popen.wait,
        "a child process, subprocess.Popen",
        "pass its output",
    ),
    "frame": (sys._getframe, None, "a stack frame, frame", "pass its text"),
    "weak reference": (lambda: weakref.ref(LOCAL), None, "a weak reference", "pass the object itself"),
    "zmq context": (zmq.Context, zmq.Context.term, "a ZeroMQ context or socket, zmq.sugar.context.Context", "connect"),
    "pool": (
        lambda: concurrent.futures.ThreadPoolExecutor(1),
        concurrent.futures.Executor.shutdown,
        "a pool or a future",
        "pass the results",
    ),
    "database": (lambda: sqlite3.connect(":memory:"), sqlite3.Connection.close, "a database connection", "connect"),
    "event loop": (asyncio.new_event_loop, lambda loop: loop.close(), "a part of an event loop", "pass results"),
}


@pytest.fixture(params=UNSENDABLE)
def unsendable(request: pytest.FixtureRequest) -> Iterator[tuple[Any, str, str]]:
    make, end, what, remedy = UNSENDABLE[request.param]
    made = make()
    yield made, what, remedy
    if end is not None:
        end(made)


def test_what_stands_for_something_of_this_process(unsendable: tuple[Any, str, str]) -> None:
    resource, what, remedy = unsendable

    def step() -> Any:
        return resource

    text = refusal(step)
    assert text.startswith(f"function 'step' captures 'resource' ({what}")
    assert "it cannot be sent to a replica" in text
    assert remedy in text
    text = refusal_of_arguments(1, {"deep": [resource]})
    assert text.startswith(f"argument \"args[1]['deep'][0]\" ({what}")


def test_which_types_must_not_be_sent() -> None:
    assert is_unsendable(iter(()))
    assert is_unsendable(numbers())
    assert not any(map(is_unsendable, (io.BytesIO(), io.StringIO(), [], np.zeros(2), Weight(), numbers, print)))


def test_what_looks_like_it_but_can_be_sent() -> None:
    text, data = io.StringIO("text"), io.BytesIO(b"data")
    assert dump_function(lambda: (text, data), adopt)


# --- the way to it ----------------------------------------------------------------------------------------------

lock = threading.Lock()


class Trainer:
    def __init__(self, guard: Any) -> None:
        self.name = "t"
        self.log = {"files": [1, guard]}

    def step(self) -> None: ...


class Slotted:
    __slots__ = ("guard",)

    def __init__(self, guard: Any) -> None:
        self.guard = guard


class UsesGlobal:
    def step(self) -> Any:
        return lock


class WithLockInClass:
    guard = lock


class Refuses:
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


def helper() -> Any:
    return lock


def step_with_helper() -> Any:
    return helper()


def step_with_default(x: int, guard: Any = lock, *, other: Any = None) -> Any: ...


def step_with_keyword_default(*, guard: Any = lock) -> Any: ...


def make(*captured: Any) -> Callable[[], Any]:
    return lambda: captured


def annotated(x: lock) -> None: ...  # type: ignore[valid-type]


def test_names_lead_to_the_culprit() -> None:
    trainer, slotted, queue = Trainer(lock), Slotted(lock), deque([1, lock])

    def step() -> Any:
        return trainer

    assert refusal(step).startswith("function 'step' captures \"trainer.log['files'][1]\" (a lock, _thread.lock)")
    assert "method 'Trainer.step' captures \"self.log['files'][1]\"" in refusal(trainer.step)
    assert "method 'UsesGlobal.step' captures" in refusal(UsesGlobal().step)
    assert "captures 'slotted.guard' (a lock" in refusal(lambda: slotted)
    assert "captures 'queue[1]' (a lock" in refusal(lambda: queue)
    assert "function 'step_with_helper' captures 'helper', which captures 'lock' (a lock" in refusal(step_with_helper)
    assert "captures 'the default of guard' (a lock" in refusal(step_with_default)
    assert "captures 'the default of guard' (a lock" in refusal(step_with_keyword_default)
    assert "captures 'the annotation of x' (a lock" in refusal(annotated)
    assert "function '<lambda>' captures 'captured[1]' (a lock" in refusal(make(1, lock))


def test_classes_and_their_parts() -> None:
    class WithProperty:
        @property
        def guarded(self) -> Any:
            return lock

    class WithStatic:
        @staticmethod
        def static() -> Any:
            return lock

    instance = WithProperty()
    assert "captures 'WithLockInClass.guard' (a lock" in refusal(lambda: WithLockInClass)
    assert "captures 'WithProperty.guarded.fget', which captures 'lock' (a lock" in refusal(lambda: WithProperty)
    assert "captures 'WithStatic.static.__func__', which captures 'lock' (a lock" in refusal(lambda: WithStatic)
    assert "captures 'instance.__class__.guarded.fget', which captures 'lock'" in refusal(lambda: instance)


def test_keys_and_sets() -> None:
    keyed, among = {lock: 1}, {lock}
    assert "(a lock, _thread.lock)" in refusal(lambda: keyed)
    assert "captures 'keyed[key <unlocked" in refusal(lambda: keyed)
    assert "captures 'among[0]' (a lock" in refusal(lambda: among)


def test_parts_of_a_partial_and_of_an_object_array() -> None:
    from functools import partial

    first, third = partial(print, lock), partial(print, end=lock)
    objects = np.array([1, lock], object)
    assert "captures 'first.args[0]' (a lock" in refusal(lambda: first)
    assert "captures \"third.keywords['end']\" (a lock" in refusal(lambda: third)
    assert re.search(r"captures 'objects\[...\]\[1\]' \(a lock", refusal(lambda: objects))
    assert refusal(partial(step_with_helper)).startswith("partial of function 'step_with_helper' captures")


def test_parts_of_modules_of_the_user() -> None:
    package, module = types.ModuleType("package_of_a_user"), types.ModuleType("package_of_a_user.module")
    package.__dict__.update(module=module, harmless=1)
    module.__dict__.update(guard=lock, fine=2)

    def through(m: Any) -> Any:
        return m.module

    assert "captures 'package.module.guard' (a lock" in refusal(lambda: package.module.guard.acquire())
    assert "captures 'package.module'" not in refusal(lambda: [package.module.guard, package.harmless])
    assert "captures 'module.guard' (a lock" in refusal(lambda: [through(module), through(None).guard])
    assert dump_function(lambda: (package.harmless, package.module.fine), adopt)


def test_an_object_that_refuses_is_named_with_its_reason() -> None:
    thing = Refuses()
    text = refusal(lambda: thing)
    assert "captures 'thing' (a tests.client.pickling.test_unpicklable.Refuses): it cannot be sent" in text
    assert "make it inside the function, or pass plain data instead (RuntimeError: not me)" in text
    said = refusal_of_arguments(k=thing)
    assert said.startswith("argument \"kwargs['k']\" (a tests.client.pickling.test_unpicklable.Refuses)")


def test_a_callable_that_refuses_is_named_itself() -> None:
    class Step(Refuses):
        def __call__(self) -> None: ...

    assert refusal(Step()).startswith("callable 'Step' (a tests.client.pickling.test_unpicklable.")


def test_nests_that_are_too_deep() -> None:
    nest: list[Any] = []
    for _ in range(100_000):
        nest = [nest]
    assert "captures 'nest' (a list), which is nested too deeply" in refusal(lambda: nest)
    assert "argument 'args[0]' (a list), which is nested too deeply" in refusal_of_arguments(nest)
    while nest:  # taken apart from outside, or freeing it would recurse as well
        nest = nest.pop()


def test_a_handle_of_a_strategy_that_was_shut_down() -> None:
    dead = Weight()

    def refuse(handle: Handle) -> tuple[str, int]:
        raise ShutdownError("this strategy was shut down")

    with pytest.raises(ShippingError, match=r"captures 'dead' \(a .*Weight\), .* this strategy was shut down"):
        dump_function(lambda: dead, refuse)


def test_things_that_refer_to_themselves_are_searched_once() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = [loop, {"again": loop}]
    assert dump_function(lambda: loop, adopt)
    loop["guard"] = lock
    assert "captures \"loop['guard']\" (a lock" in refusal(lambda: loop)
