"""The public API in a typed user's file: what type checkers make of the installed packages."""

import importlib.util
import sys
from pathlib import Path

import pytest
from tests.harness import processes
from tests.harness.timing import unit

_TYPING = Path(__file__).parent / "typing"
_PYRIGHT = ("pyright", "--pythonpath", sys.executable)
_MYPY = ("mypy", "--strict", f"--cache-dir={processes.ROOT / '.mypy_cache' / 'user'}")
#: `make lint` has mypy check the files, as strictly, together with the packages, but without the types of frameworks,
#: which mypy reads for minutes.
_CASES = [
    (_PYRIGHT, "user_file.py"),
    (_MYPY, "user_file.py"),
    (_PYRIGHT, "torch_user_file.py"),
    (_PYRIGHT, "jax_file.py"),
    (_MYPY, "jax_file.py"),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("command", "name"), _CASES, ids=lambda each: each if isinstance(each, str) else each[0])
def test_a_typed_file_passes(command, name, tmp_path):
    framework = name.partition("_")[0]
    if framework != "user" and importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    # Outside the repository, whose own settings are not the user's.
    copy = tmp_path / name
    copy.write_text((_TYPING / name).read_text())
    checker, *options = command
    ended = processes.run(sys.executable, "-m", checker, *options, str(copy), directory=tmp_path, timeout=unit(200))
    assert ended.code == 0, str(ended)
