"""A server's configuration says what is wrong with it and what would be right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cs_proto.errors import ConfigurationError, DeviceError
from cs_server.config import ServerConfig

GOOD = ServerConfig("/run/user/0/cs-1", "cpu:0", replicas=2, threads=2, machine_nbytes=1 << 34, address_nbytes=1 << 46)


def test_a_good_one() -> None:
    assert GOOD.endpoint == "ipc:///run/user/0/cs-1/server"
    assert GOOD.incarnation == 1


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"run_directory": "relative"}, ConfigurationError, "'relative' must be an absolute path of at most 87 bytes"),
        ({"run_directory": "/" + "é" * 60}, ConfigurationError, "choose a shorter one"),
        ({"replicas": 0}, ConfigurationError, "not 0"),
        ({"replicas": 1025}, ConfigurationError, "from 1 to 1024, not 1025"),
        ({"threads": 0}, ConfigurationError, "threads"),
        ({"incarnation": 0}, ConfigurationError, "incarnation"),
        ({"machine_nbytes": 0}, ConfigurationError, "0 bytes"),
        ({"address_nbytes": 0}, ConfigurationError, r"addresses for segments \(0 bytes\)"),
        ({"parameter_device": "GPU:0"}, DeviceError, "'GPU:0' is not a device in short form; write it like cpu:0"),
        ({"parameter_device": "cpu"}, DeviceError, "write it like cpu:0"),
    ],
)
def test_what_makes_no_sense(changes: dict[str, object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        replace(GOOD, **changes)  # type: ignore[arg-type]
