"""The public API in a typed user's file: what type checkers make of the installed packages."""

import sys
from pathlib import Path

import pytest
from tests.harness import processes
from tests.harness.timing import unit

_USER_FILE = Path(__file__).parent / "typing" / "user_file.py"


_PYRIGHT = ("pyright", "--pythonpath", sys.executable)
_MYPY = ("mypy", "--strict", f"--cache-dir={processes.ROOT / '.mypy_cache' / 'user'}")
#: `make lint` has mypy check the file, as strictly, together with the packages.
_COMMANDS = [
    pytest.param(_PYRIGHT, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
    pytest.param(_MYPY, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
]


@pytest.mark.parametrize("command", _COMMANDS, ids=lambda c: c[0])
def test_a_typed_file_passes(command, tmp_path):
    # Outside the repository, whose own settings are not the user's.
    copy = tmp_path / "user_file.py"
    copy.write_text(_USER_FILE.read_text())
    checker, *options = command
    ended = processes.run(sys.executable, "-m", checker, *options, str(copy), directory=tmp_path, timeout=unit(200))
    assert ended.code == 0, str(ended)
