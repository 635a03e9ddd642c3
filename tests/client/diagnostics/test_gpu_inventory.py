"""Which GPUs there are and who sees them; over made-up driver directories."""

from __future__ import annotations

from pathlib import Path

import pytest

from central_storage.diagnostics import gpu_inventory
from central_storage.diagnostics.gpu_inventory import Gpu

UUIDS = ("GPU-0abc-def", "GPU-1abc-def")


def driver_of(directory: Path, *models: str) -> Path:
    """What the driver shows for a GPU of each model, the number of whose device file counts down."""
    for number, model in enumerate(models):
        gpu = directory / "gpus" / f"0000:0{number + 1}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(
            f"Model: \t\t {model}\nIRQ:   \t\t 50\nGPU UUID: \t GPU-{number}abc-def\nBus Location: \t {gpu.name}\n"
            f"Device Minor: \t {len(models) - 1 - number}\n"
        )
    return directory / "gpus"


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    return driver_of(tmp_path, "A", "A")


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    """A directory for device files: none there yet."""
    (tmp_path / "dev").mkdir()
    return tmp_path / "dev"


@pytest.mark.parametrize(
    ("visible", "entries"),
    [
        ("0,1", ["0", "1"]),
        ("1", ["1"]),
        ("-1", []),
        ("", []),
        ("0,7,1", ["0"]),
        ("GPU-1a", ["GPU-1a"]),
        ("GPU-1abc-def, GPU-0abc-def", ["GPU-1abc-def", "GPU-0abc-def"]),
        ("1,GPU-0", ["1", "GPU-0"]),
        ("GPU-", []),  # either
        ("MIG-1-2,MIG-3", ["MIG-1-2", "MIG-3"]),
        ("NoDevFiles", []),
        ("0,1,0", []),
        ("0,GPU-0a", []),  # the same
    ],
)
def test_cuda_visible_devices_means_what_it_means_to_cuda(
    driver: Path, nodes: Path, visible: str, entries: list[str]
) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu.entry for gpu in gpu_inventory.visible_gpus(driver, environment, nodes)] == entries
    assert gpu_inventory.gpu_count(driver, visible) == len(entries)


def test_each_gpu_is_known_by_uuid_address_and_file(driver: Path, nodes: Path) -> None:
    first, second = Gpu("0", UUIDS[0], "0000:01:00.0", "1"), Gpu("1", UUIDS[1], "0000:02:00.0", "0")
    assert gpu_inventory.visible_gpus(driver, {}, nodes) == [first, second]
    environment = {"CUDA_VISIBLE_DEVICES": f"1,MIG-{UUIDS[0]}/3/0,MIG-9"}
    divided = Gpu(f"MIG-{UUIDS[0]}/3/0", UUIDS[0], "0000:01:00.0", "1")
    assert gpu_inventory.visible_gpus(driver, environment, nodes) == [second, divided, Gpu("MIG-9")]
    assert [gpu.is_part for gpu in (second, divided)] == [False, True]


def test_instances_of_the_only_gpu_are_its_own(tmp_path: Path, nodes: Path) -> None:
    driver = driver_of(tmp_path, "A")
    found = gpu_inventory.visible_gpus(driver, {"CUDA_VISIBLE_DEVICES": "MIG-9,MIG-8"}, nodes)
    assert found == [Gpu(entry, UUIDS[0], "0000:01:00.0", "0") for entry in ("MIG-9", "MIG-8")]


def test_numbers_of_unlike_gpus_count_in_an_order_that_only_cuda_knows(tmp_path: Path, nodes: Path) -> None:
    driver = driver_of(tmp_path, "slow", "fast")
    assert gpu_inventory.visible_gpus(driver, {}, nodes) == [Gpu("0"), Gpu("1")]
    assert gpu_inventory.visible_gpus(driver, {"CUDA_VISIBLE_DEVICES": "GPU-1,0"}, nodes) == [
        Gpu("GPU-1", UUIDS[1], "0000:02:00.0", "0"),
        Gpu("0"),
    ]
    said = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert [gpu.uuid for gpu in gpu_inventory.visible_gpus(driver, said, nodes)] == list(UUIDS)


def test_a_container_has_the_gpus_whose_files_it_has(driver: Path, nodes: Path) -> None:
    (nodes / "nvidiactl").touch()
    assert len(gpu_inventory.visible_gpus(driver, {}, nodes)) == 2  # no first use yet: that makes the files
    (nodes / "nvidia0").touch()
    assert gpu_inventory.visible_gpus(driver, {}, nodes) == [Gpu("0", UUIDS[1], "0000:02:00.0", "0")]


def test_a_driver_that_says_nothing_of_a_gpu(tmp_path: Path, nodes: Path) -> None:
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (nodes / "nvidia0").touch()
    assert gpu_inventory.visible_gpus(tmp_path / "gpus", {}, nodes) == [Gpu("0", address="0000:01:00.0")]
    assert gpu_inventory.visible_gpus(tmp_path / "none", {"CUDA_VISIBLE_DEVICES": "0,1"}, nodes) == []


def test_a_process_of_the_service_still_counts_as_the_user_does(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CS_NVIDIA_DRIVER", str(driver))
    user = gpu_inventory.visible_gpus(driver, {})
    for name, value in gpu_inventory.shown("gpu:1", user).items():
        monkeypatch.setenv(name, value)
    assert gpu_inventory.gpu_count() == 2
    assert gpu_inventory.user_visible() is None
    monkeypatch.setenv("CS_VISIBLE_DEVICES", "1")
    assert gpu_inventory.gpu_count() == 1
