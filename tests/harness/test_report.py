"""The report of a failed test shows what every process said and heard."""

import sys

from . import processes

_FAILING = """
import central_storage as cs

def test_it():
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        strategy.run(lambda: print("said in a replica"))
        raise AssertionError("on purpose")
"""


def test_a_failed_test_shows_the_last_messages_and_lines_of_every_process(tmp_path):
    (tmp_path / "test_failing.py").write_text(_FAILING)
    options = ("-p", "tests.conftest", "-p", "no:cacheprovider", "-c", str(processes.ROOT / "pyproject.toml"))
    ended = processes.run(sys.executable, "-m", "pytest", *options, str(tmp_path), directory=processes.ROOT)
    assert ended.code == 1, str(ended)
    for role, message in (("script", "send Run("), ("server", "to b'w1.1'"), ("supervisor", "Ready(")):
        section = next(text for text in ended.out.split("- log ") if text.startswith(f"{role}."))
        assert message in section, section
    for role in ("w0", "w1"):
        assert f"log {role}.log" in ended.out
        assert "run 1 has ended" in ended.out
    assert "said in a replica" in ended.out
