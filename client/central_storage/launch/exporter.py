"""The exporter, a process beside the service that serves its metrics to Prometheus: its socket and its token."""

from __future__ import annotations

import os
import re
import socket
import stat
import sys
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

from cs_proto.errors import ConfigurationError
from cs_proto.frozen import frozen

from .packages import python_path
from .plan import sidecar_command
from .sidecar import Sidecar, listen

__all__ = ["TOKEN_FILE", "Endpoint", "read_token"]

#: Its name in the run directory.
TOKEN_FILE = "metrics-token"
_TOKEN_NBYTES = 32
# What a file with a token may have in it; RFC 6750 calls it b64token.
_TOKEN = re.compile(rb"[A-Za-z0-9._~+/=-]{16,4096}")


@frozen
class Endpoint:
    """Where metrics are served: a socket that listens, and the file with the token that scrapers must show."""

    listener: socket.socket
    token_file: str

    @classmethod
    def open(cls, address: str, port: int, token_file: str | None, run_directory: str) -> Self:
        """Listen on ``address`` and ``port`` (0: a free one). Without a ``token_file``, make a token in the run
        directory.

        Raises ConfigurationError for an address that this machine does not have and for a token file that others can
        read, and LaunchError for a port that is in use.
        """
        if token_file is not None:
            token_file = os.path.abspath(token_file)
            read_token(token_file)
        options = f"--metrics-address {address!r}", f"--metrics-port {port}"
        with ExitStack() as undo:
            listener = undo.enter_context(listen(address, port, address_option=options[0], port_option=options[1]))
            endpoint = cls(listener, token_file or _make_token(run_directory))
            undo.pop_all()
        return endpoint

    def sidecar(self, run_directory: str) -> Sidecar:
        """The process that serves the metrics of the service in ``run_directory``."""
        command = sidecar_command(
            "central_storage.exporter",
            run_directory,
            ("--token-file", self.token_file, "--descriptor", str(self.listener.fileno())),
            os.environ,
            python=sys.executable,
            python_path=python_path(os.environ),
        )
        return Sidecar("exporter", "there are no metrics", command, self.listener)

    @property
    def url(self) -> str:
        """What Prometheus scrapes."""
        host, port = self.listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"

    def __str__(self) -> str:
        return f"metrics on {self.url}, token in {self.token_file}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.listener.close()


def read_token(path: str) -> bytes:
    """The token in a file, without white space around it. Raises ConfigurationError if the file is not private to this
    user, or holds no token."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigurationError(f"--metrics-token-file: {path} is no regular file")
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise ConfigurationError(
                    f"--metrics-token-file: {path} must belong to you and be closed to other users (chmod 600)"
                )
            token = file.read(8192).strip()
    except OSError as error:
        raise ConfigurationError(f"--metrics-token-file: {path} cannot be read: {error.strerror}") from error
    if not _TOKEN.fullmatch(token):
        raise ConfigurationError(
            f"--metrics-token-file: {path} holds no token: 16 to 4,096 of the characters A-Z a-z 0-9 . _ ~ + / = -, "
            "such as openssl rand -hex 32 makes"
        )
    return token


def _make_token(run_directory: str) -> str:
    import secrets  # late: a supervisor without metrics does not need it

    path = os.path.join(run_directory, TOKEN_FILE)
    with suppress(FileNotFoundError):  # of a run that was killed
        os.unlink(path)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(f"{secrets.token_hex(_TOKEN_NBYTES)}\n")
    return path
