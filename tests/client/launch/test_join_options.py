"""The run directories of the workers of ``cs-launch --join`` on another machine."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from central_storage.launch.join_options import _run_directories


@pytest.mark.parametrize("is_used", [False, True])
def test_a_directory_for_several_workers_goes_unless_others_have_put_something_there(is_used: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:  # a short path, for sockets
        _try(Path(directory, "own"), is_used)


def _try(there: Path, is_used: bool) -> None:
    with ExitStack() as undo:
        made = _run_directories(str(there), 2, undo)
        assert made == [str(there / "0"), str(there / "1")]
        if is_used:
            (there / "notes").write_text("")
    assert there.exists() == is_used
    if is_used:
        assert os.listdir(there) == ["notes"]
