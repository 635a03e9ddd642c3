"""The endpoint of metrics before anything starts: addresses, tokens and the options of ``cs-launch``."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from central_storage.launch import cli
from central_storage.launch.exporter import Endpoint, read_token
from cs_proto.errors import ConfigurationError, LaunchError

TOKEN = "0123456789abcdef"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_free_port_and_a_private_token(tmp_path: Path) -> None:
    tokens = set()
    for _ in range(2):  # the second run finds what a killed one has left
        with Endpoint.open("127.0.0.1", 0, None, str(tmp_path)) as endpoint:
            port = endpoint.listener.getsockname()[1]
            assert endpoint.url == f"http://127.0.0.1:{port}/metrics"
            assert endpoint.token_file == str(tmp_path / "metrics-token")
            assert stat.S_IMODE(os.stat(endpoint.token_file).st_mode) == 0o600
            tokens.add(read_token(endpoint.token_file))
            assert not os.get_inheritable(endpoint.listener.fileno())
    assert len(tokens) == 2
    assert all(len(bytes.fromhex(each.decode())) == 32 for each in tokens)


def test_a_token_of_the_user(token: Path, tmp_path: Path) -> None:
    with Endpoint.open("localhost", 0, str(token), str(tmp_path)) as endpoint:
        assert endpoint.token_file == str(token)
        assert read_token(endpoint.token_file) == TOKEN.encode()
    assert not (tmp_path / "metrics-token").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: path.chmod(0o640), "must belong to you and be closed to other users"),
        (lambda path: path.write_text("short\n"), "holds no token"),
        (lambda path: path.write_text("a token with spaces"), "holds no token"),
        (lambda path: path.unlink(), "cannot be read: No such file"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read: Is a directory"),
        (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "is no regular file"),
    ],
)
def test_a_token_file_is_refused(token: Path, tmp_path: Path, change: object, said: str) -> None:
    assert callable(change)
    change(token)
    with pytest.raises(ConfigurationError, match=rf"^--metrics-token-file: {token} ({said})"):
        Endpoint.open("127.0.0.1", 0, str(token), str(tmp_path))


def test_an_address_that_cannot_be_used(taken: int, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=rf"^--metrics-port {taken}: .* in use; choose another port, or 0"):
        Endpoint.open("127.0.0.1", taken, None, str(tmp_path))
    for address in ("192.0.2.1", "no such host", "a" * 300):
        with pytest.raises(ConfigurationError, match=rf"^--metrics-address '{address}' is no address of this machine"):
            Endpoint.open(address, 0, None, str(tmp_path))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--metrics-port", "65536"], "--metrics-port must be a number from 0 to 65535, not 65536"),
        (["--metrics-port", "-1"], "--metrics-port must be a number from 0 to 65535, not -1"),
        (["--metrics-port", "http"], "argument --metrics-port: invalid int value: 'http'"),
        (["--metrics-address", "::1"], "--metrics-address needs --metrics-port"),
        (["--metrics-token-file", "x"], "--metrics-token-file needs --metrics-port"),
        (["--metrics-port", "0", "--metrics-address", ""], "--metrics-address needs the name or number of an address"),
        (["--metrics-port", "0", "--join"], "--metrics-port is for the launcher of a service, and --join starts none"),
    ],
)
def test_options_that_are_refused(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = [] if "--join" in options else [__file__]
    assert cli.main([*options, *script]) == 2
    assert capsys.readouterr().err.startswith(f"cs-launch: error: {said}")


def test_without_the_library_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("central_storage.diagnostics.extras.find_spec", lambda name: None)
    assert cli.main(["--metrics-port", "0", __file__]) == 2
    said = "--metrics-port needs prometheus_client: pip install 'central-storage[metrics]'"
    assert capsys.readouterr().err == f"cs-launch: error: {said}\n"


def test_a_port_in_use_ends_the_start(taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--metrics-port", str(taken), __file__]) == 3
    assert f"--metrics-port {taken}: nobody can listen on 127.0.0.1 port {taken}: " in capsys.readouterr().err
