"""Services of stand-ins for the tests of the supervisor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.client.launch.standins import STANDIN, World, standin_environment

from central_storage.launch.packages import python_path
from central_storage.launch.run_directory import RunDirectory


@pytest.fixture
def world() -> Iterator[World]:
    """A service to be started and driven in the test's own thread."""
    directory = RunDirectory()
    made = World(directory)
    try:
        yield made
    finally:
        made.close()
        directory.remove()


@pytest.fixture
def standins(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """The environment in which ``cs_server`` and ``cs_worker`` are stand-ins that run the code given by label."""

    def make(**code: str) -> dict[str, str]:
        for package in ("cs_server", "cs_worker"):
            (tmp_path / "standins" / package).mkdir(parents=True, exist_ok=True)
            (tmp_path / "standins" / package / "__init__.py").touch()
            (tmp_path / "standins" / package / "__main__.py").write_text(STANDIN)
        path = os.pathsep.join([str(tmp_path / "standins"), python_path({})])
        return {**standin_environment(**code), "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}

    return make
