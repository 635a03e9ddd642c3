"""The public API in a typed user's file: what type checkers make of the installed packages."""

import importlib.util
import sys
from pathlib import Path

import pytest
from tests.harness import processes
from tests.harness.timing import unit

_TYPING = Path(__file__).parent / "typing"
#: A file of a user, and the package that it needs, if any.
_FILES = [pytest.param("user_file.py", None, id="api"), pytest.param("jax_file.py", "jax", id="jax")]


_PYRIGHT = ("pyright", "--pythonpath", sys.executable)
_MYPY = ("mypy", "--strict", f"--cache-dir={processes.ROOT / '.mypy_cache' / 'user'}")
#: `make lint` has mypy check the file, as strictly, together with the packages.
_COMMANDS = [
    pytest.param(_PYRIGHT, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
    pytest.param(_MYPY, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
]


@pytest.mark.parametrize("command", _COMMANDS, ids=lambda c: c[0])
@pytest.mark.parametrize(("name", "needed"), _FILES)
def test_a_typed_file_passes(name, needed, command, tmp_path):
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    # Outside the repository, whose own settings are not the user's.
    copy = tmp_path / name
    copy.write_text((_TYPING / name).read_text())
    checker, *options = command
    ended = processes.run(sys.executable, "-m", checker, *options, str(copy), directory=tmp_path, timeout=unit(200))
    assert ended.code == 0, str(ended)
