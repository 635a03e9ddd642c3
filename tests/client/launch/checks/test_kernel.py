"""The kernel: its release, every feature that is tried, and its clock."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from central_storage.launch.checks import kernel
from central_storage.launch.checks.kernel import FEATURES, Feature
from cs_proto.frozen import with_changes


def test_this_kernel_has_all() -> None:
    for found in (list(kernel.release()), list(kernel.features()), list(kernel.clock())):
        assert [finding.level for finding in found] == ["good"]
    [finding] = kernel.features()
    assert finding.text == ", ".join(feature.subject for feature in FEATURES) + " work"


@pytest.mark.parametrize(("system", "release"), [("Linux", "5.2.21-generic"), ("Linux", "4.19"), ("FreeBSD", "14.1")])
def test_an_old_kernel_is_bad(system: str, release: str) -> None:
    [finding] = kernel.release(system, release)
    assert (finding.level, finding.remedy) == ("bad", "use Linux 5.3 or later")
    assert f"{system} {release}" in finding.text


@pytest.mark.parametrize("release", ["5.3.0", "6.18.44-custom", "10.0-rc1"])
def test_a_new_kernel_is_good(release: str) -> None:
    [finding] = kernel.release("Linux", release)
    assert finding.level == "good"


@pytest.mark.parametrize("feature", FEATURES, ids=[feature.subject for feature in FEATURES])
def test_a_feature_that_is_refused_is_named_with_its_remedy(feature: Feature) -> None:
    def refuse() -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    tried = tuple(with_changes(each, attempt=refuse) if each is feature else each for each in FEATURES)
    refused, others = kernel.features(tried)
    assert (refused.level, refused.subject, refused.remedy) == (feature.level, feature.subject, feature.remedy)
    assert refused.text == f"{feature.use}: does not work (Operation not permitted)"
    assert feature.remedy
    assert feature.subject not in others.text.split()[0:-1]


def _refuses(*_: object, **__: object) -> int:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize(
    ("subject", "call"),
    [
        ("memfd", "os.memfd_create"),
        ("memfd", "fcntl.fcntl"),
        ("pidfd", "os.pidfd_open"),
        ("eventfd", "os.eventfd"),
        ("SCM_RIGHTS", "socket.socketpair"),
        ("SCM_RIGHTS", "socket.send_fds"),
        ("affinity", "os.sched_setaffinity"),
    ],
)
def test_each_attempt_uses_the_call(subject: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [feature] = [each for each in FEATURES if each.subject == subject]
    monkeypatch.setattr(call, _refuses)
    with pytest.raises(PermissionError):
        feature.attempt()


@pytest.mark.parametrize("subject", ["futex", "PDEATHSIG"])
def test_a_call_of_the_c_library_that_fails_is_an_error(subject: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def syscall(self, *_: object) -> int:
            return -1

        prctl: Callable[..., int] = syscall

    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: Library())
    monkeypatch.setattr("ctypes.get_errno", lambda: errno.ENOSYS)
    [feature] = [each for each in FEATURES if each.subject == subject]
    with pytest.raises(OSError, match="Function not implemented"):
        feature.attempt()


def test_descriptors_that_do_not_arrive_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.recv_fds", lambda link, *_: (link.recv(1), [], 0, None))
    with pytest.raises(OSError, match="did not arrive"):
        kernel._socket()


@pytest.mark.parametrize(
    ("source", "level"), [("tsc", "good"), ("kvm-clock", "good"), ("arch_sys_counter", "good"), ("hpet", "slower")]
)
def test_a_clock_that_is_slow_to_read_is_named(tmp_path: Path, source: str, level: str) -> None:
    directory = tmp_path / "devices/system/clocksource/clocksource0"
    directory.mkdir(parents=True)
    (directory / "current_clocksource").write_text(f"{source}\n")
    [finding] = kernel.clock(tmp_path)
    assert (finding.level, bool(finding.remedy)) == (level, level == "slower")
    assert source in finding.text


def test_a_kernel_need_not_name_its_clock(tmp_path: Path) -> None:
    [finding] = kernel.clock(tmp_path)
    assert finding.level == "good"
