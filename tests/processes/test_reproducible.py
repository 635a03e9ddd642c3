"""Two builds of one tree are the same bytes, and the lock of the development environment is whole (P39)."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.harness.processes import ROOT
from tests.harness.timing import unit

BUILT = ("proto", "server", "worker", "client", "docs", "pyproject.toml", "README.md", "LICENSE", ".gitignore")
LOCK = (ROOT / "requirements-dev.lock").read_text()


def digests(tree: Path, umask: int) -> dict[str, str]:
    """The files that are built from a copy of this tree, made at another time and by somebody with that umask."""
    before = os.umask(umask)
    try:
        for name in BUILT:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(
                    source, tree / name, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copyfile
                )
            else:
                tree.mkdir(exist_ok=True)
                shutil.copyfile(source, tree / name)
        command = [sys.executable, "-m", "hatchling", "build"]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=unit(50), check=False
        )
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tree / "dist").iterdir()}


def test_two_builds_are_the_same_bytes(tmp_path: Path) -> None:
    one, other = digests(tmp_path / "one", 0o022), digests(tmp_path / "other", 0o077)
    assert sorted(name.rpartition(".")[2] for name in one) == ["gz", "whl"]
    assert one == other


def loose(lock: str) -> list[str]:
    """The entries of a lock that do not say which files of which version may be installed, and from no address."""
    entries = re.split(r"\n(?=[A-Za-z])", re.sub(r"^#.*\n", "", lock, flags=re.MULTILINE).strip())
    assert len(entries) > 50
    is_firm = re.compile(r"[^\n]*==(?s:.*)--hash=sha256:[0-9a-f]{64}")
    return [each.partition("\n")[0] for each in entries if not is_firm.match(each) or "://" in each]


def test_every_package_of_the_lock_has_hashes_and_none_has_an_address() -> None:
    assert loose(LOCK) == []


def test_a_lock_that_is_loose_is_noticed() -> None:
    [(name, version)] = re.findall(r"^(numpy)==([\d.]+)", LOCK, re.MULTILINE)[:1]
    for broken in (
        LOCK.replace(f"{name}=={version}", f"{name}>={version}"),
        re.sub(rf"(?ms)^{name}==.*?\n(?=[a-z])", f"{name}=={version}\n", LOCK),
        LOCK.replace(f"{name}=={version}", f"{name} @ https://example.org/{name}.whl"),
    ):
        assert [each for each in loose(broken) if each.startswith(name)] != []


def test_the_lock_has_what_the_extra_names() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {re.split(r"[\[<>=]", each)[0].lower() for each in extras["dev"]} - {"central-storage"}
    locked = {name.lower() for name in re.findall(r"^([\w.-]+)(?:\[.*\])?==", LOCK, re.MULTILINE)}
    assert wanted - locked == set()
