"""A process that stands by, and becomes what it is told to be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = """
import ctypes, json, os, sys
import numpy._core._multiarray_umath as numpy
try:
    threads = ctypes.CDLL(numpy.__file__).scipy_openblas_get_num_threads64_()
except AttributeError:  # another library
    threads = int(os.environ["OPENBLAS_NUM_THREADS"])
kept = {name: os.environ.get(name) for name in ("GOES", "COMES")}
print(json.dumps([__name__, sys.argv[1:], kept, sys.stdin.read(), threads, sorted(os.sched_getaffinity(0))]))
"""


@pytest.mark.parametrize("imported", ["numpy", "no_such_module"])
def test_a_process_becomes_what_it_is_told_to_be(tmp_path: Path, imported: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(PACKAGE)
    process = subprocess.Popen(
        [sys.executable, "-m", "cs_runtime.standby", "package", imported],
        env={"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}", "GOES": "1", "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    changes = {"GOES": None, "COMES": "2", "OPENBLAS_NUM_THREADS": "2"}
    processors = sorted(os.sched_getaffinity(0))[:2]
    told = {"arguments": ["--replica", "1"], "environment": changes, "processors": processors}
    out, _ = process.communicate(json.dumps(told).encode() + b"\n")
    told_back = ["__main__", ["--replica", "1"], {"GOES": None, "COMES": "2"}, "", len(processors), processors]
    assert (process.returncode, json.loads(out)) == (0, told_back)


def test_a_process_that_is_told_nothing_ends() -> None:
    ended = subprocess.run([sys.executable, "-m", "cs_runtime.standby", "cs_worker"], stdin=subprocess.DEVNULL)
    assert ended.returncode == 0


def test_a_numpy_whose_threads_cannot_be_set_is_loaded_anew(tmp_path: Path) -> None:
    (tmp_path / "numpy" / "core").mkdir(parents=True)
    for name in ("__init__", "core/__init__", "core/_multiarray_umath"):  # as NumPy 1 has them
        (tmp_path / "numpy" / f"{name}.py").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import os; print(open('/proc/self/environ').read())")
    process = subprocess.Popen(
        [sys.executable, "-m", "cs_runtime.standby", "package", "numpy.core._multiarray_umath"],
        env={"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}", "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    told = {"arguments": [], "environment": {"OPENBLAS_NUM_THREADS": "2"}, "processors": []}
    out, _ = process.communicate(json.dumps(told).encode() + b"\n")
    assert "OPENBLAS_NUM_THREADS=2" in out.decode().split("\0")
