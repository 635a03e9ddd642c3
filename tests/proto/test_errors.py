"""The closed table takes every exception across, and nothing else."""

from __future__ import annotations

import builtins

import pytest

from cs_proto import errors
from cs_proto.errors import (
    CODES,
    CentralStorageError,
    PeerProtocolError,
    ReplicaError,
    code_of,
    replica_exception_class,
)

BUILT_FROM_PARTS = ("UnicodeDecodeError", "UnicodeEncodeError", "UnicodeTranslateError")


@pytest.mark.parametrize("code", CODES)
def test_every_code_raises_what_it_names(code: str) -> None:
    raised = replica_exception_class(code)
    assert issubclass(raised, CentralStorageError)
    if code.startswith("cs."):
        assert raised is getattr(errors, code[3:])
        assert code_of(raised) == code
    else:
        original = getattr(builtins, code)
        assert issubclass(raised, ReplicaError)
        assert issubclass(raised, original)
        assert code_of(original) == code
    if code not in BUILT_FROM_PARTS:
        assert "the message" in str(raised("the message"))


def test_every_error_of_ours_has_a_code_or_is_abstract() -> None:
    ours = {
        kind
        for name in errors.__all__
        if isinstance(kind := getattr(errors, name), type) and issubclass(kind, CentralStorageError)
    }
    coded = {CODES[code] for code in CODES if code.startswith("cs.")}
    assert ours - coded == {errors.ProtocolError, ReplicaError}
    assert coded <= ours


def test_every_exception_of_python_has_the_code_of_a_listed_base() -> None:
    for kind in vars(builtins).values():
        if isinstance(kind, type) and issubclass(kind, BaseException):
            code = code_of(kind)
            assert code == "Exception" or issubclass(kind, getattr(builtins, code))


class _OfAUser(KeyError):
    pass


class _OfAUserAndOurs(errors.InvalidArgumentError):
    pass


class _BadName(Exception):
    __module__ = "cs_proto.errors"
    __qualname__ = "DeviceError"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (_OfAUser, "KeyError"),
        (_OfAUserAndOurs, "cs.InvalidArgumentError"),
        (_BadName, "Exception"),
        (type("ValueError", (Exception,), {}), "Exception"),
        (ReplicaError, "Exception"),
        (CODES["KeyError"], "KeyError"),
        (BaseExceptionGroup, "Exception"),
        (SystemExit, "SystemExit"),
        (KeyboardInterrupt, "KeyboardInterrupt"),
    ],
)
def test_the_nearest_listed_class_counts(kind: type[BaseException], code: str) -> None:
    assert code_of(kind) == code


@pytest.mark.parametrize("code", ["", "cs.", "cs.ProtocolError", "os.system", "eval", "ReplicaKeyError", "keyerror"])
def test_an_unknown_code_is_the_peers_fault(code: str) -> None:
    with pytest.raises(PeerProtocolError, match="unknown exception code"):
        replica_exception_class(code)


def test_what_a_replica_raised_is_caught_as_in_one_process() -> None:
    with pytest.raises(KeyError):
        raise CODES["KeyError"]("w")
    with pytest.raises(Exception, match="3"):
        raise CODES["SystemExit"](3)
    error = CODES["ZeroDivisionError"]("x")
    assert isinstance(error, ReplicaError)
    assert (error.replica, error.merge_index) == (-1, 0)
    assert type(error).__name__ == "ReplicaZeroDivisionError"


def test_the_tree_drawn_in_the_module_is_the_tree() -> None:
    drawn = errors.__doc__ or ""
    for name in errors.__all__:
        kind = getattr(errors, name)
        if isinstance(kind, type):
            assert f" {name} " in drawn or f" {name}\n" in drawn, name
            foreign = [base.__name__ for base in kind.__bases__ if not issubclass(base, CentralStorageError)]
            if foreign and kind is not CentralStorageError:
                line = next(line for line in drawn.splitlines() if f" {name} " in line)
                assert f"({', '.join(foreign)})" in line
