"""Wrappers that shorten tracebacks: where no user's frame calls them, and around coroutines."""

from __future__ import annotations

import _thread
import asyncio
import inspect
import sys
import threading
import traceback
from typing import Any

import pytest

from central_storage import aio, nest
from central_storage.diagnostics.tracebacks import shortened


def test_an_error_keeps_its_kind_where_no_frame_is_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    told = threading.Event()

    def hook(unraisable: Any) -> None:
        seen.append((unraisable.exc_type, unraisable.exc_value.__context__))
        told.set()

    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sys, "unraisablehook", hook)
    _thread.start_new_thread(shortened(fail), ())  # as an atexit callback, it is called by no frame
    assert told.wait(10)
    assert seen == [(ZeroDivisionError, None)]


def test_a_coroutine_function_stays_one_and_is_shortened() -> None:
    assert inspect.iscoroutinefunction(shortened(aio.Observer.statistics))

    async def ours(leaf: object) -> object:
        return nest.map_structure(lambda x: 1 / x, leaf)

    wrapped = shortened(ours)

    async def user() -> object:
        return await wrapped(0)

    with pytest.raises(ZeroDivisionError) as raised:
        asyncio.run(user())
    names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert "map_structure" not in names
    assert names[-1] == "<lambda>"
