"""Functions of the user's own modules, with what they use of those modules, run in replicas."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.harness.processes import ROOT, run

PACKAGE = {
    "mine/__init__.py": "",
    "mine/numbers.py": """
rate = 1.0

class Mine(Exception):
    pass
""",
    "mine/steps.py": """
import central_storage as cs
from . import numbers
from .numbers import Mine

def plain():
    return numbers.rate

frozen = cs.function(plain)

def fails():
    raise Mine("from a replica", 7)
""",
    "train.py": """
import central_storage as cs
from mine import numbers, steps

strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"])

def asked(function):
    return strategy.experimental_local_results(strategy.run(function))

print(asked(steps.plain), asked(steps.frozen))
numbers.rate = 2.0
print(asked(steps.plain), asked(steps.frozen))
try:
    strategy.run(steps.fails)
except Exception as error:
    print(type(error).__name__, isinstance(error, numbers.Mine), error.args)
""",
}


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param((), id="alone", marks=pytest.mark.slow),
        pytest.param(("cs-launch", "--devices", "cpu:0,cpu:1"), id="launched"),
    ],
)
def test_strategy_and_variables_at_module_level(launcher: tuple[str, ...], tmp_path: Path) -> None:
    ended = run(*launcher, ROOT / "examples/two_files/train.py", directory=tmp_path).ok()
    found = re.search(r"^(\d+\.\d)% told right$", ended.out, re.MULTILINE)
    assert found, ended
    assert float(found.group(1)) > 95
    assert len(re.findall(r"^epoch \d+  loss 0\.\d{3}$", ended.out, re.MULTILINE)) == 4


def test_a_package_of_the_script(tmp_path: Path) -> None:
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    ended = run(tmp_path / "train.py").ok()
    assert ended.lines == [
        "(1.0, 1.0) (1.0, 1.0)",
        "(2.0, 2.0) (1.0, 1.0)",
        "Mine True ('from a replica', 7)",
    ]
