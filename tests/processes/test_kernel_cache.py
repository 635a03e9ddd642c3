"""The code that is kept for later processes: what is read, what is compiled anew, and which directories are used."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.timing import unit
from tests.harness.updates import HYPERPARAMETERS

from cs_server.compute import kernels
from cs_server.compute.kernels import ALWAYS, cache_directory
from cs_server.rules import RULES, reference

PROGRAM = """
import json, sys
import numpy as np
from cs_server.compute import kernels
from cs_server.rules import RULES
assert "numba" not in sys.modules, "importing the module must stay cheap"
loaded = kernels.load()
assert loaded.compiled or "numba" not in sys.modules, "kept code must not need it"
LOADED = [RULES[name] for name in ("sgd", "adam")]

seen = []
sys.addaudithook(lambda event, arguments: seen.append(event))
HYPERPARAMETERS = {
    "learning_rate": 0.5, "momentum": 0.5, "beta_1": 0.5, "beta_2": 0.5, "epsilon": 0.5, "rho": 0.5, "beta": 0.5,
    "weight_decay": 0.5, "initial_accumulator_value": 0.5, "learning_rate_power": -0.5,
    "l1_regularization_strength": 0.5, "l2_regularization_strength": 0.5, "l2_shrinkage_regularization_strength": 0.5,
}
values = []
for replicas in (1, 3):
    for rule in LOADED:
        w, g = np.ones(4, "float32"), np.ones(4, "float32")
        slots = tuple(np.zeros(4, "float32") for _ in rule.slots)
        kernels.apply_dense(rule, np.array([[0, 4]]), w, slots, (g,) * replicas, HYPERPARAMETERS, 1)
        values.append(float(w[0]))
events = sorted({e for e in seen if e.split(".")[0] in ("import", "compile", "exec", "open", "pickle", "marshal")})
print(json.dumps([loaded.compiled, str(loaded.directory), events, values]))
"""


def start(home: Path, program: str = PROGRAM, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([*(entry for entry in sys.path if entry)])
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program],
        env=os.environ | {"XDG_CACHE_HOME": str(home), "PYTHONPATH": path} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcomes(*processes: subprocess.Popen[str], said: str = "") -> list[tuple[int, str, list[str], list[float]]]:
    """Compiled kernels, directory, what the first updates did beside arithmetic, and their results. On standard error
    they have ``said`` that, among others."""
    try:
        results = []
        for process in processes:
            output, complaint = process.communicate(timeout=unit(150))
            assert process.returncode == 0, complaint
            assert said in complaint
            results.append(tuple(json.loads(output)))
        return results
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def contents(directory: Path) -> dict[str, tuple[int, int]]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in files}


def file_of(name: str, dtype: str) -> str:
    """The name of the file that holds the kernel of a rule."""
    return kernels._path(RULES.get(name), name, np.dtype(dtype), Path()).name


def test_code_is_kept_under_the_name_of_what_its_step_computes() -> None:
    rule, dtype = RULES["sgd"], np.dtype("float32")

    def sgd(w: Any, g: Any, learning_rate: Any) -> tuple[Any]:
        return (w + learning_rate * g,)

    again = replace(rule, numbers=RULES["sgd_momentum"].numbers)
    assert kernels._path(again, "sgd", dtype, Path()) == kernels._path(rule, "sgd", dtype, Path())
    changed = kernels._path(replace(rule, step=sgd), "sgd", dtype, Path())
    assert changed != kernels._path(rule, "sgd", dtype, Path())
    by_row = RULES["rowwise_adagrad"]
    changed = kernels._path(replace(by_row, row=lambda w, g, *numbers: g), "rowwise_adagrad", dtype, Path())
    assert changed != kernels._path(by_row, "rowwise_adagrad", dtype, Path())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds what is always loaded."""
    kept = cache_directory()
    assert kept is not None
    home = tmp_path_factory.mktemp("home")
    directory = home / "central-storage" / kept.name
    for made in (directory.parent, directory):
        made.mkdir(mode=0o700)
    for rule, dtype in ALWAYS:
        shutil.copy(kept / file_of(rule, dtype), directory)
    return home


@pytest.mark.slow
def test_two_processes_may_fill_a_cache_at_once(tmp_path: Path) -> None:
    found = outcomes(start(tmp_path), start(tmp_path))
    for compiled, directory, events, _ in found:
        assert 0 <= compiled <= len(ALWAYS)
        assert Path(directory).parent.parent == tmp_path
        assert events == []
    assert max(compiled for compiled, *_ in found) > 0
    assert {file_of(rule, dtype) for rule, dtype in ALWAYS} == set(contents(Path(found[0][1])))


def test_a_later_process_compiles_nothing(home: Path) -> None:
    directory = next((home / "central-storage").iterdir())
    before = contents(directory)
    assert set(before) >= {file_of(rule, dtype) for rule, dtype in ALWAYS}
    [(compiled, found, events, values)] = outcomes(start(home))
    assert compiled == 0
    assert found == str(directory)
    assert events == []
    assert contents(directory) == before
    assert directory.stat().st_mode & 0o777 == directory.parent.stat().st_mode & 0o777 == 0o700
    for (name, _), value in zip(ALWAYS, values, strict=False):
        rule, w, one = RULES[name], np.ones(1, "float32"), np.ones(1, "float32")
        hyperparameters = dict.fromkeys(HYPERPARAMETERS, 0.5)
        reference(rule, w, [one], tuple(np.zeros(1, "float32") for _ in rule.slots), hyperparameters, 1)
        assert value == w[0]


@pytest.mark.slow
def test_what_an_update_needed_is_kept_and_read_by_the_first_that_needs_it_again(home: Path) -> None:
    """The program's first update with another rule compiles it; in the next process it opens one file."""
    directory = next((home / "central-storage").iterdir())
    another = PROGRAM.replace('("sgd", "adam")', '("sgd", "adam", "adagrad")')
    said = "compiling adagrad for float32, which takes seconds, once for each user\n"
    [(compiled, _, events, _)] = outcomes(start(home, another), said=said)
    assert compiled == 0
    assert events != []
    assert (directory / file_of("adagrad", "float32")).exists()
    before = contents(directory)
    [(compiled, _, events, _)] = outcomes(start(home, another))
    assert (compiled, events) == (0, ["open"])
    assert contents(directory) == before


OTHER = """
import numpy as np
from cs_server.compute import kernels
from cs_server.rules import RULES
arrays = [np.ones(4) for _ in range(3)]
HYPERPARAMETERS = {"learning_rate": 0.5, "epsilon": 0.5}
kernels.apply_dense(RULES["adagrad"], np.array([[0, 4]]), *arrays[:1], (arrays[1],), (arrays[2],), HYPERPARAMETERS, 1)
kernels.merge_kernel(np.dtype("float64"))
"""


@pytest.mark.slow
def test_what_another_process_keeps_meanwhile_is_used_and_not_unpickled(home: Path, tmp_path: Path) -> None:
    [filled] = (home / "central-storage").iterdir()
    here = tmp_path / "central-storage" / filled.name
    here.mkdir(mode=0o700, parents=True)
    here.parent.chmod(0o700)
    for rule, dtype in ALWAYS:
        shutil.copy(filled / file_of(rule, dtype), here)
    meanwhile = f"""
import json, subprocess, sys
import numpy as np
from cs_server.compute import kernels
kernels.load()
subprocess.run([sys.executable, "-c", {OTHER!r}], check=True)
seen = []
sys.addaudithook(lambda event, arguments: seen.append(arguments[0] if event == "import" else event))
exec({OTHER!r})
events = sorted(str(event) for event in seen if str(event).startswith(("pickle", "cs_server.compute.jit")))
print(json.dumps([0, str(kernels.cache_directory()), events, arrays[0].tolist()]))
"""
    [(_, directory, events, values)] = outcomes(start(tmp_path, meanwhile))
    assert events == []
    assert values == [1 - 0.5 / (np.sqrt(2) + 0.5)] * 4
    kept = {file_of(*each) for each in (*ALWAYS, ("adagrad", "float64"), ("merge", "float64"))}
    assert set(os.listdir(directory)) == kept
    assert os.listdir(Path(directory).parent) == [Path(directory).name]


def test_damaged_code_is_not_read(home: Path, tmp_path: Path) -> None:
    [directory] = (home / "central-storage").iterdir()
    whole = (directory / file_of("sgd", "float32")).read_bytes()
    copy = tmp_path / file_of("sgd", "float32")
    for damaged in (whole[:100], whole[:-1] + b"?", b""):
        copy.write_bytes(damaged)
        assert kernels._read(copy) is None
    copy.write_bytes(whole)
    assert kernels._read(copy) is not None


@pytest.mark.slow
def test_damaged_code_is_compiled_anew(home: Path) -> None:
    [directory] = (home / "central-storage").iterdir()
    sgd = directory / file_of("sgd", "float32")
    sgd.write_bytes(b"")
    said = "compiling the kernels that every service has, which takes seconds, once for each user\n"
    [(compiled, *_)] = outcomes(start(home, PROGRAM.replace("load()", "load(is_awaited=True)")), said=said)
    assert compiled == 1
    assert kernels._read(sgd) is not None
    [(compiled, *_)] = outcomes(start(home))
    assert compiled == 0


def test_a_numba_told_not_to_compile_leaves_the_work_to_the_reference(tmp_path: Path) -> None:
    [(compiled, _, _, values)] = outcomes(start(tmp_path, NUMBA_DISABLE_JIT="1"))
    assert compiled == 0
    assert values[0] == 0.5


def _others_may_write(base: Path) -> None:
    base.chmod(0o777)


def _a_file(base: Path) -> None:
    base.rmdir()
    base.write_text("")


def _a_link(base: Path) -> None:
    (base / "elsewhere").mkdir(mode=0o700)
    (base / "central-storage").symlink_to(base / "elsewhere")


def _group_may_write(base: Path) -> None:
    (base / "central-storage").mkdir()
    (base / "central-storage").chmod(0o770)


@pytest.mark.parametrize("spoil", [_others_may_write, _a_file, _a_link, _group_may_write])
def test_a_doubtful_home_is_not_used(
    spoil: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base, run_directory = tmp_path / "cache", tmp_path / "run"
    base.mkdir(mode=0o700)
    spoil(base)
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    with caplog.at_level(logging.WARNING):
        found = cache_directory(run_directory)
        assert found is not None
        assert found.parent == run_directory
        assert found.stat().st_mode & 0o777 == 0o700
        assert cache_directory() is None
    assert str(run_directory) in caplog.text
    assert str(base) in caplog.text


def test_a_home_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert cache_directory() is None
    with pytest.raises(PermissionError, match="belongs to another user"):
        cache_directory(tmp_path / "run")


@pytest.mark.parametrize("value", ["", "relative"])
def test_without_a_usable_variable_the_home_is_used(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = cache_directory()
    assert found is not None
    assert found.parent == tmp_path / ".cache" / "central-storage"
    assert found.name.startswith("kernels-")
