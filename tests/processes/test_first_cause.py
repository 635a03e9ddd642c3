"""Ways in which a training fails under ``cs-launch``: each is named, on the terminal, in the error file and by the
exit code, as what it is and not as what followed from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.harness.processes import run
from tests.soak.causes import CASES, failed

#: Slow tests: another case shows the same rule.
LIKE_OTHERS = {
    "exit code": "early exit 0",
    "killed": "segmentation fault",
    "import error": "exception",
    "memory limit": "exception",
    "function that cannot be sent": "exception",
}
TRIED = [pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ()) for name in CASES]


@pytest.mark.parametrize("name", TRIED)
def test_the_first_cause_is_named(name: str) -> None:
    assert failed(name) == []


def test_a_run_that_ends_well_leaves_no_file_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text("{}")
    (tmp_path / "train.py").write_text("import central_storage as cs\ncs.CentralStorageStrategy().run(lambda: None)\n")
    run("cs-launch", "--devices", "cpu:0,cpu:1", "--error-file", "error.json", "train.py", directory=tmp_path).ok()
    assert not (tmp_path / "error.json").exists()


def test_a_script_without_a_launcher_leaves_one_too() -> None:
    assert failed("killed", launched=False) == []
