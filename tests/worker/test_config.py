"""What a worker is told at its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from cs_proto.errors import ConfigurationError
from cs_worker.config import Config


def test_names(tmp_path: Path) -> None:
    config = Config(str(tmp_path), 2, 3, "cpu:0")
    assert config.name == "w2.3"
    assert config.endpoint == f"ipc://{tmp_path}/w2.3"


@pytest.mark.parametrize(("replica", "incarnation", "option"), [(-1, 1, "--replica"), (0, 0, "--incarnation")])
def test_numbers_that_make_no_sense(tmp_path: Path, replica: int, incarnation: int, option: str) -> None:
    with pytest.raises(ConfigurationError, match=option):
        Config(str(tmp_path), replica, incarnation, "cpu:0")


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not a directory"):
        Config(str(tmp_path / "missing"), 0, 1, "cpu:0")


def test_a_directory_too_long_for_a_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with pytest.raises(ConfigurationError, match="at most 102 work; choose a shorter"):
        Config(str(deep), 0, 1, "cpu:0")
