"""The head of a training of Ray Train, without Ray, and a service that a few lines of shell stand for."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.harness.timing import unit

from central_storage.ray.head import Head
from cs_proto.errors import LaunchError

DIRECTORIES = """echo '{"run": "run", "keys": "keys", "drafts": "drafts"}'"""
LISTENS = "echo 'workers and observers on tcp://127.0.0.1:1, keys in keys'"
#: More than a stream of asyncio takes, and than a pipe holds.
LONG_LINE = "head -c 300000 /dev/zero | tr '\\\\0' x; echo"


async def until_the_end(head: Head) -> bool:
    """What another rank hears that waits for a report when the function of rank 0 ends."""
    waiting = asyncio.ensure_future(head.after(0))
    await asyncio.sleep(0)
    try:
        await head.end()
    finally:
        said = await waiting
    return said


def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> Head:
    """A head whose service is this shell script."""
    service = tmp_path / "service"
    service.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    service.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(service))
    return Head()


def run(what: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(what(), unit(20))

    asyncio.run(limited())


def test_a_long_line_of_the_service_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = serving(tmp_path, monkeypatch, DIRECTORIES, LONG_LINE, LISTENS, LONG_LINE, "exec sleep 1000")

    async def whole() -> None:
        assert await head.serve(2, "127.0.0.1") == ("run", "drafts")
        assert not await until_the_end(head)

    run(whole)


def test_the_other_ranks_hear_of_the_end_if_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = serving(tmp_path, monkeypatch, "echo '{'", "exec sleep 1000")

    async def whole() -> None:
        with pytest.raises(LaunchError, match="the service of the training did not start"):
            await head.serve(2, "127.0.0.1")
        with pytest.raises(ValueError, match="Expecting property name"):
            await until_the_end(head)

    run(whole)


def test_a_worker_does_not_wait_for_a_service_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    head = Head()

    async def whole() -> None:
        admission = asyncio.ensure_future(head.admit("worker-0", "key", "node"))
        with pytest.raises(FileNotFoundError):
            await head.serve(2, "127.0.0.1")
        with pytest.raises(LaunchError, match="did not start"):
            await admission

    run(whole)
