"""Device names and the count of GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from central_storage.core.devices import device_names
from cs_proto.errors import DeviceError


@pytest.mark.parametrize(
    ("given", "short"),
    [
        ("CPU:0", "cpu:0"),
        ("cpu:7", "cpu:7"),
        ("/gpu:1", "gpu:1"),
        ("/GPU:01", "gpu:1"),
        ("/device:CPU:0", "cpu:0"),
        ("device:GPU:3", "gpu:3"),
        ("/job:localhost/replica:0/task:0/device:GPU:2", "gpu:2"),
        ("/job:localhost/cpu:1", "cpu:1"),
        ("/cpu", "cpu:0"),
        ("GPU", "gpu:0"),
    ],
)
def test_every_spelling_has_one_short_form(given: str, short: str) -> None:
    assert device_names.canonical(given) == short
    assert device_names.canonical(device_names.full_name(given)) == short


@pytest.mark.parametrize("given", ["", "gp", "cpu:", "cpu:-1", "tpu:0", "/job:worker/task:1/cpu:0", "cpu:0 ", 0, None])
def test_what_is_no_device_is_refused_by_name(given: str) -> None:
    with pytest.raises(DeviceError, match="is not a device") as caught:
        device_names.canonical(given)
    assert repr(given) in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "empty"),
        ("", "empty"),
        (b"cpu:0", "a list"),
        (iter(["cpu:0"]), "a list"),
        (True, "a number"),
        (0, "from 1 to 1024"),
    ],
)
def test_a_list_is_a_list(given: list[str], words: str) -> None:
    with pytest.raises(DeviceError, match=words):
        device_names.compute_devices(given, 3)


def test_cpus_are_logical_and_one_may_come_twice() -> None:
    assert device_names.compute_devices(["CPU:0", "/cpu:63", "cpu:0"], 3) == ["cpu:0", "cpu:63", "cpu:0"]


def test_a_replica_may_own_several() -> None:
    assert device_names.compute_devices([("CPU:0", "/cpu:1"), "cpu:2+cpu:3"], 3) == ["cpu:0+cpu:1", "cpu:2+cpu:3"]
    assert device_names.compute_devices([["cpu:0"]], 3) == ["cpu:0"]
    assert device_names.logical_devices("cpu:0+cpu:1") == ["cpu:0", "cpu:1"]
    assert device_names.parameter_device(None, ["cpu:1+cpu:2"]) == "cpu:1"
    assert device_names.parameter_device(None, ["cpu:1+cpu:2", "cpu:3+cpu:4"]) == "cpu:0"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([("cpu:0", "cpu:1"), "cpu:2"], "the same number"),
        ([()], "tuple of strings"),
        ([{"cpu:0"}], "tuple of strings"),
        ([("cpu:0", 1)], "1 is not a device"),
        (["cpu:0+"], "'' is not a device"),
        ([("cpu:0", "GPU:99")], "'GPU:99' does not exist"),
    ],
)
def test_several_devices_that_make_no_replica(given: list[Any], words: str) -> None:
    with pytest.raises(DeviceError, match=words):
        device_names.compute_devices(given, 3)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the driver shows for two GPUs."""
    for address in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / address).mkdir()
    monkeypatch.setenv("CS_NVIDIA_DRIVER", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_the_default_is_every_gpu_else_one_cpu(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_names.compute_devices(None, 3) == ["gpu:0", "gpu:1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert device_names.compute_devices(None, 3) == ["gpu:0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_names.compute_devices(None, 3) == ["cpu:0"]


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("gpu:all", ["gpu:0", "gpu:1"]),
        ("/GPU:all, cpu:0", ["gpu:0", "gpu:1", "cpu:0"]),
        (["gpu:all", "cpu"], ["gpu:0", "gpu:1", "cpu:0"]),
        ("auto", ["gpu:0", "gpu:1"]),
        (["auto"], ["gpu:0", "gpu:1"]),
        (1, ["gpu:0"]),
        ("2", ["gpu:0", "gpu:1"]),
        (["gpu"] * 2, ["gpu:0", "gpu:1"]),
        (["cpu"] * 3, ["cpu:0", "cpu:1", "cpu:2"]),
        (["cpu", "/CPU:0", "CPU"], ["cpu:1", "cpu:0", "cpu:2"]),
        ([("cpu", "cpu"), "cpu+cpu"], ["cpu:0+cpu:1", "cpu:2+cpu:3"]),
    ],
)
def test_script_and_launcher_name_devices_in_one_language(driver: Path, given: Any, written: list[str]) -> None:
    assert device_names.compute_devices(given, 3) == written


def test_auto_and_a_number_without_gpus(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"3 devices were asked for, but there is gpu:0, gpu:1; write \['cpu'\] \* 3"):
        device_names.compute_devices(3, 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_names.compute_devices(3, 1) == ["cpu:0", "cpu:1", "cpu:2"]
    assert device_names.compute_devices("Auto", 3) == ["cpu:0", "cpu:1", "cpu:2"]
    assert device_names.compute_devices("auto", 64) == [f"cpu:{number}" for number in range(8)]
    with pytest.raises(DeviceError, match=r"'gpu:all': there is no GPU \(CUDA_VISIBLE_DEVICES is ''\); use auto"):
        device_names.compute_devices("gpu:all", 3)
    with pytest.raises(DeviceError, match="'auto' is not a device"):
        device_names.compute_devices(["auto", "cpu:0"], 3)


def test_a_gpu_that_is_not_there_is_an_error_that_lists_those_that_are(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeviceError, match=r"'/gpu:2' does not exist; there is gpu:0, gpu:1, and cpu:0"):
        device_names.compute_devices(["cpu:0", "/gpu:2"], 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(DeviceError, match=r"does not exist \(CUDA_VISIBLE_DEVICES is '0'\); there is gpu:0, and"):
        device_names.parameter_device("gpu:1", ["cpu:0"])


def test_variables_lie_on_the_only_device_or_on_cpu_0() -> None:
    assert device_names.parameter_device(None, ["gpu:0"]) == "gpu:0"
    assert device_names.parameter_device(None, ["cpu:1", "cpu:2"]) == "cpu:0"
    assert device_names.parameter_device("/CPU:5", ["cpu:1"]) == "cpu:5"
