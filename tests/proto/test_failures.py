"""Any exception becomes a record that can be sent and whose code can be raised from its message."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cs_proto.codec import decode, encode
from cs_proto.errors import LocalProtocolError, MemoryPlanError, replica_exception_class
from cs_proto.failures import TEXT_LENGTH, error_of, pid_of
from cs_proto.messages import Died, Error, Join, Worker


class _OfAUser(LookupError):
    pass


@pytest.mark.parametrize(
    ("exception", "code", "message"),
    [
        (ValueError("no"), "ValueError", "no"),
        (KeyError("w"), "KeyError", "'w'"),
        (_OfAUser("gone"), "LookupError", "gone"),
        (MemoryPlanError("too much"), "cs.MemoryPlanError", "too much"),
        (SystemExit(3), "SystemExit", "3"),
        (ValueError(), "ValueError", ""),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "UnicodeError", "can't decode byte 0xff"),
    ],
)
def test_an_exception_as_data(exception: BaseException, code: str, message: str) -> None:
    error = error_of(exception, replica=2, merge_index=5, traceback="Traceback ...")
    assert error.exception == code
    assert message in error.message
    assert (error.replica, error.merge_index, error.traceback) == (2, 5, "Traceback ...")
    assert error.origin == f"{type(exception).__module__}:{type(exception).__qualname__}"
    assert decode(encode(error)) == error
    assert issubclass(replica_exception_class(code), Exception)
    replica_exception_class(code)(error.message)


def test_it_belongs_to_no_replica_unless_said() -> None:
    assert error_of(ValueError("x")) == Error("ValueError", "x", None, "builtins:ValueError", -1, 0, "")


def test_text_that_is_not_unicode_is_escaped(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    with pytest.raises(FileNotFoundError) as caught:
        (tmp_path / name).read_bytes()
    error = error_of(caught.value, traceback=f"in {name}")
    assert "caf\\udce9" in error.message
    assert error.traceback == "in caf\\udce9"
    assert decode(encode(error)) == error


def test_long_text_is_cut_the_traceback_from_its_beginning() -> None:
    error = error_of(ValueError("m" * 10 + "n" * TEXT_LENGTH), traceback="a" * TEXT_LENGTH + "the end")
    assert len(error.message) == len(error.traceback) == TEXT_LENGTH
    assert error.message.startswith("m" * 10)
    assert error.traceback.endswith("the end")
    assert decode(encode(error)) == error


@pytest.mark.parametrize("node", ["10.0.0.7", "fd00::7%eth0", "node-7.example", ""])
def test_a_process_is_named_with_its_machine(node: str) -> None:
    worker, died = Worker(3, 1, 91, "cpu:3", node), Died("worker", 3, 1, 91, "SIGKILL", "", node=node)
    assert pid_of(worker) == pid_of(died) == (f"pid 91 on {node}" if node else "pid 91")
    assert decode(encode(worker)) == worker


@pytest.mark.parametrize("node", ["a b", "\x1b[2J", "10.0.0.7\n", "\u0661\u0660.0.0.7", "x" * 256])
def test_what_is_no_machine(node: str) -> None:
    for build in (lambda: Worker(3, 1, 91, "cpu:3", node), lambda: Join(1, 91, node=node)):
        with pytest.raises(LocalProtocolError, match="is no node"):
            build()
