"""What ``cs-launch --ray`` refuses within seconds, before the script runs, with nothing left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.harness.processes import Ended, run
from tests.harness.timing import unit
from tests.ray.conftest import Running
from tests.ray.leavings import run_directories

pytestmark = pytest.mark.timeout(unit(120))


def refused(tmp_path: Path, *options: str, environment: Mapping[str, str | None], code: int = 3) -> str:
    """What is said of these options. The script has not run, and nothing is left."""
    (tmp_path / "script.py").write_text("print('has run')")
    ended: Ended = run(
        "cs-launch", "--ray", *options, "script.py", environment=environment, directory=tmp_path, timeout=unit(60)
    )
    assert ended.code == code, str(ended)
    assert "has run" not in ended.out + ended.err
    assert run_directories() == []
    return ended.err


NOWHERE: Mapping[str, str | None] = {"RAY_ADDRESS": None, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def test_no_cluster_at_an_address(tmp_path: Path) -> None:
    said = refused(tmp_path, "127.0.0.1:1", "--workers", "2", environment=NOWHERE)
    assert "there is no Ray cluster at 127.0.0.1:1 (Connection refused)" in said


def test_ray_client(tmp_path: Path) -> None:
    said = refused(tmp_path, "ray://127.0.0.1:10001", "--workers", "2", environment=NOWHERE, code=2)
    assert "ray job submit --working-dir . -- cs-launch --ray auto" in said


def test_more_than_the_cluster_has(cluster: Running, tmp_path: Path) -> None:
    """The cluster answers, since a token is used without its mode. Ray itself would not use it, and fail after a long
    time."""
    environment = {**cluster.environment, "RAY_AUTH_MODE": None}
    options = ("auto", "--workers", "2", "--worker-resources", "CPU=1,tapes=4", "--start-timeout", "4")
    said = refused(tmp_path, *options, environment=environment)
    assert "within 4 s (--start-timeout): 2 workers need tapes 8, but the cluster has tapes 0 (0 free) on 3 nodes" in (
        said
    )


def test_more_nodes_than_there_are(cluster: Running, tmp_path: Path) -> None:
    """A plan is refused like a training."""
    options = ("auto", "--workers", "4", "--workers-per-node", "1", "--plan", "--start-timeout", "4")
    said = refused(tmp_path, *options, environment=cluster.environment)
    assert "4 workers need 4 nodes for 1 each, but the cluster has 3 nodes" in said


def test_what_is_waited_for_is_said_every_ten_seconds(cluster: Running, tmp_path: Path) -> None:
    options = ("auto", "--workers", "9", "--start-timeout", "11")
    said = refused(tmp_path, *options, environment=cluster.environment)
    assert "waiting for Ray: 9 workers need CPU 9, but the cluster has CPU 6 (6 free) on 3 nodes\n" in said


def test_another_token(cluster: Running, tmp_path: Path) -> None:
    environment = {**cluster.environment, "RAY_AUTH_TOKEN": "0" * 64}
    said = refused(tmp_path, "auto", "--workers", "2", environment=environment)
    assert "if it asks for a token, set RAY_AUTH_MODE=token" in said
    assert "ray get-auth-token" in said


@pytest.mark.parametrize(
    ("module", "text", "said"),
    [
        ("version", "__version__ = '0.0.0'", "has central-storage 0.0.0 (protocol"),
        ("version", "raise ImportError('no such module')", "has no central-storage for"),
    ],
)
def test_a_node_with_another_version_or_none(
    cluster: Running, tmp_path: Path, module: str, text: str, said: str
) -> None:
    """The runtime environment puts another package in front."""
    other = tmp_path / "other" / "cs_proto"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("from pkgutil import extend_path\n__path__ = extend_path(__path__, __name__)\n")
    (other / f"{module}.py").write_text(text)
    (tmp_path / "env.yaml").write_text(f"env_vars:\n  PYTHONPATH: {other.parent}\n")
    options = ("auto", "--workers", "2", "--runtime-env", str(tmp_path / "env.yaml"))
    found = refused(tmp_path, *options, environment=cluster.environment)
    assert "error: the node 127.0.0.1 " + said in found


def test_a_runtime_environment_that_is_none(cluster: Running, tmp_path: Path) -> None:
    (tmp_path / "env.yaml").write_text("- a list\n")
    options = ("auto", "--workers", "2", "--runtime-env", str(tmp_path / "env.yaml"))
    said = refused(tmp_path, *options, environment=cluster.environment, code=2)
    assert "the file of --runtime-env holds no runtime environment of Ray" in said
