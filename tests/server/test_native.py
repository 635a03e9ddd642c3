"""Kept machine code gets into memory without LLVM, and is left to LLVM where it is of another kind."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest

from cs_server.compute import kernels, object_loader
from cs_server.compute.undo import Lane
from cs_server.rules import RULES


def code_of(name: str, dtype: str) -> bytes:
    directory = kernels.cache_directory()
    assert directory is not None
    code = kernels._read(kernels._path(name, np.dtype(dtype), directory))
    assert code is not None
    return code


def no_llvm(code: bytes) -> None:
    raise AssertionError("LLVM was asked")


def updated() -> list[float]:
    """What SGD makes of three of five parameters, and of one row of three."""
    parameters, gradient = np.arange(5, dtype=np.float32), np.full(5, 2, np.float32)
    kernels.apply_dense(RULES["sgd"], np.array([[1, 4]]), parameters, (), (gradient,), {"learning_rate": 0.5}, 1)
    table, values = np.arange(3, dtype=np.float32).reshape(3, 1), np.full((2, 1), 2, np.float32)
    rows = kernels.BoundRows(RULES["sgd"], table, ())
    rows.take([(values, np.array([1, 1]))])
    rows.apply(0, 1, Lane(), {"learning_rate": 0.5}, 1)
    return [*parameters.tolist(), *table.reshape(-1).tolist()]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="LLVM does it for other processors")
def test_every_kernel_does_without_llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_loader, "by_llvm", no_llvm)
    names = [rule.name for rule in RULES.values() if rule.is_compiled]
    for name in (*names, *(f"{name}_rows" for name in names), "merge"):
        for dtype in kernels.KERNEL_DTYPES:
            assert object_loader.in_memory(code_of(name, dtype)), (name, dtype)
            object_loader.kernel(code_of(name, dtype))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="LLVM does it for other processors")
def test_a_server_imports_neither_numba_nor_llvm_for_what_is_kept() -> None:
    code_of("sgd", "float32")
    code = (
        "import sys; from cs_server.compute import kernels; assert not kernels.load().compiled; "
        "sys.exit(', '.join({'numba', 'llvmlite'} & sys.modules.keys()) or None)"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=60, check=False, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_code_does_the_same_whoever_puts_it_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    code_of("sgd", "float32")
    with monkeypatch.context() as fresh:
        fresh.setattr(kernels, "_kernels", {})
        if platform.machine() == "x86_64":
            fresh.setattr(object_loader, "by_llvm", no_llvm)
        ours = updated()
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(object_loader, "in_memory", lambda code: None)
    assert ours == updated() == [0, 0, 1, 2, 4, 0, -1, 2]


def test_what_is_not_for_it_is_left_to_llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    code = code_of("sgd", "float32")
    assert object_loader.in_memory(b"") is None
    assert object_loader.in_memory(code[:18] + b"\xb7" + code[19:]) is None  # for another processor
    assert object_loader.in_memory(code.replace(b"\0kernel\0", b"\0nobody\0")) is None
    calling = code_of("sgd_rows", "float32")
    assert object_loader.in_memory(calling.replace(b"\0memset\0", b"\0memcpy\0")) is None
    other = object_loader._RELOCATION.pack(0, 2, 1, 0)[8:12]  # relative to where it is
    wrong = bytearray(code)
    for section in _relocations(code):
        wrong[section + 8 : section + 12] = other
    assert object_loader.in_memory(bytes(wrong)) is None
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert object_loader.in_memory(code) is None


def _relocations(code: bytes) -> list[int]:
    """Where the relocations of the code lie."""
    _, _, _, _, _, sections_at, _, count, _ = object_loader._HEADER.unpack_from(code)
    sections = [
        object_loader._SECTION.unpack_from(code, sections_at + n * object_loader._SECTION.size) for n in range(count)
    ]
    kinds = [section for section in sections if section[1] == 4 and sections[section[7]][1] == 1]
    return [
        at for section in kinds for at in range(section[4], section[4] + section[5], object_loader._RELOCATION.size)
    ]


OF_THE_MOMENT = ("processor", "physical id", "core id", "siblings", "cpu cores", "apicid", "initial apicid")
OF_THE_MOMENT += ("cpu MHz", "microcode", "bogomips", "BogoMIPS")


def test_a_processor_is_named_by_what_does_not_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "_CPUINFO", tmp_path / "cpuinfo")

    def named(**changed: str) -> str:
        lines = dict.fromkeys(OF_THE_MOMENT, "1") | {"flags": "fma avx2", "model": "1"} | changed
        first = "".join(f"{name}\t: {value}\n" for name, value in lines.items())
        kernels._CPUINFO.write_text(f"{first}\nprocessor\t: 1\nflags\t: of another\n")
        return kernels._processor()

    for name in OF_THE_MOMENT:
        assert named(**{name: "2"}) == named(), name
    for name in ("flags", "model"):
        assert named(**{name: "2"}) != named(), name
    assert "avx2" in named()
    assert "another" not in named()


def test_a_processor_of_which_the_kernel_says_nothing_is_named_by_llvm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels, "_CPUINFO", tmp_path)  # not to be read: a directory
    assert kernels._processor().split() == [llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()]
    assert kernels.cache_directory() is not None
