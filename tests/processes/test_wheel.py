"""A wheel built from the tree and installed where nothing else of the project is runs the demonstration."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from tests.harness.processes import ROOT
from tests.harness.timing import unit

PACKAGES = {"central_storage", "cs_proto", "cs_runtime", "cs_server", "cs_worker"}


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=unit(120), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def link_dependencies(site: Path) -> None:
    """Put all that this environment has installed into ``site``, but this project."""
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "central_storage" not in entry.name and entry.name not in PACKAGES:
            (site / entry.name).symlink_to(entry)


@pytest.mark.slow
def test_the_demonstration_from_a_wheel(tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT, cwd=ROOT)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        tops = {name.split("/")[0] for name in content.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES

    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    link_dependencies(site)
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    imported = run(python, "-c", "import central_storage; print(central_storage.__file__)", cwd=tmp_path)
    assert imported.startswith(str(site))

    (tmp_path / "digits.py").write_text((ROOT / "examples" / "digits.py").read_text())
    printed = run(environment / "bin" / "cs-launch", "--devices", "cpu:0,cpu:1", "digits.py", cwd=tmp_path)
    assert float(printed.splitlines()[-1].removeprefix("test accuracy ")) >= 0.97
    for script in ("cs-server", "cs-worker"):
        assert "--run-directory" in run(environment / "bin" / script, "--help", cwd=tmp_path)
