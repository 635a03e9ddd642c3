"""The shape of the project as tests: public names, who imports what, and a README in every role's folder."""

from __future__ import annotations

import ast
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest
from tests.harness.processes import ROOT, Ended, run

import central_storage

PACKAGES = {
    "proto": {"cs_proto", "cs_runtime"},
    "server": {"cs_server"},
    "worker": {"cs_worker"},
    "client": {"central_storage"},
}
ROLES = tuple(PACKAGES)

PUBLIC = """
    CentralStorageStrategy CommunicationImplementation CommunicationOptions Counters DistributedDataset
    DistributedIterator DistributedValues IndexedSlices InputContext InputOptions InputReplicationMode Mirrored
    PerReplica ReduceOp ReplicaContext RunOptions StrategyExtended Tensor TensorSpec ValueContext Variable
    VariableAggregation VariableSynchronization add aio compat connect constant convert_to_tensor data device
    distribute errors experimental_set_strategy function get_array_module get_replica_context get_strategy
    gradient_buffers has_strategy identity in_cross_replica_context metrics nest nn optimizers progress random range
    reshape running_strategies span summary train
"""

#: Contract -> (file that exists, line that breaks it).
BROKEN = {
    "roles": ("client/central_storage/core/values.py", "import cs_server.rules"),
    "worker-reach": ("worker/cs_worker/config.py", "import central_storage.strategy.open_service"),
    "worker-face": ("worker/cs_worker/devices/device.py", "import central_storage.checkpoint.graph"),
    "proto-pure": ("proto/cs_proto/records.py", "import time"),
    "proto-layers": ("proto/cs_proto/ranges.py", "import cs_proto.codec"),
    "runtime-layers": ("proto/cs_runtime/trace.py", "import cs_runtime.shared_memory.arena"),
    "transport-layers": ("proto/cs_runtime/transport/poller.py", "import cs_runtime.transport.channel"),
    "shared-memory-layers": ("proto/cs_runtime/shared_memory/mapping.py", "import cs_runtime.shared_memory.arena"),
    "server-no-code": ("server/cs_server/compute/kernels.py", "import pickle"),
    "server-layers": ("server/cs_server/rules/rule.py", "import cs_server.memory.segments"),
    "rules-layers": ("server/cs_server/rules/rule.py", "import cs_server.rules.torch"),
    "engine-opens-nothing": ("server/cs_server/engine/steps/merge.py", "import socket"),
    "session-core-pure": ("worker/cs_worker/session/core.py", "import select"),
    "engine-layers": ("server/cs_server/engine/store/state.py", "import cs_server.engine.steps.runs"),
    "engine-steps-layers": ("server/cs_server/engine/steps/merge.py", "import cs_server.engine.steps.progress"),
    "engine-catalogue-layers": (
        "server/cs_server/engine/catalogue/slabs.py",
        "import cs_server.engine.catalogue.updates",
    ),
    "engine-store-layers": ("server/cs_server/engine/store/versions.py", "import cs_server.engine.store.state"),
    "compute-layers": ("server/cs_server/compute/undo.py", "import cs_server.compute.executor"),
    "gpu-layers": ("server/cs_server/gpu/blocks.py", "import cs_server.gpu.store"),
    "worker-layers": ("worker/cs_worker/execution/outgoing.py", "import cs_worker.loop"),
    "session-layers": ("worker/cs_worker/session/interrupts.py", "import cs_worker.session.conversation"),
    "execution-layers": ("worker/cs_worker/execution/functions.py", "import cs_worker.execution.replica"),
    "client-layers": ("client/central_storage/core/options.py", "import central_storage.controller.session"),
    "timeline-layers": ("client/central_storage/timeline/rings.py", "import central_storage.timeline.chrome_trace"),
    "controller-opens-nothing": ("client/central_storage/controller/liveness.py", "import time"),
    "controller-layers": ("client/central_storage/controller/waits.py", "import central_storage.controller.runs"),
    "frameworks": ("worker/cs_worker/randomness/seeds.py", "import central_storage.torch"),
    "ray": ("client/central_storage/launch/gpu_usage.py", "import ray"),
    "jax-layers": ("client/central_storage/jax/schedules.py", "import central_storage.jax.step"),
    "ray-layers": ("client/central_storage/ray/host.py", "import central_storage.ray.placer"),
    "torch-layers": ("client/central_storage/torch/parameters.py", "import central_storage.torch.step"),
    "planning-layers": ("client/central_storage/planning/plan.py", "import central_storage.planning.link"),
    "ctl-layers": ("client/central_storage/ctl/services.py", "import central_storage.ctl.commands.ls"),
    "cluster-layers": ("client/central_storage/cluster/ranges.py", "import central_storage.cluster.mirror"),
    "exporter-layers": (
        "client/central_storage/exporter/endpoint.py",
        "import central_storage.exporter.__main__",
    ),
    "launch-layers": ("client/central_storage/launch/packages.py", "import central_storage.launch.cli"),
}
#: Every module of these has a layer.
EXHAUSTIVE = {
    "cs_proto",
    "cs_runtime",
    "cs_runtime.transport",
    "cs_runtime.shared_memory",
    "cs_server",
    "cs_server.rules",
    "cs_server.engine",
    "cs_server.engine.steps",
    "cs_server.engine.catalogue",
    "cs_server.engine.store",
    "cs_server.compute",
    "cs_server.gpu",
    "cs_worker",
    "cs_worker.session",
    "cs_worker.execution",
    "central_storage",
    "central_storage.cluster",
    "central_storage.controller",
    "central_storage.ctl",
    "central_storage.exporter",
    "central_storage.jax",
    "central_storage.launch",
    "central_storage.planning",
    "central_storage.ray",
    "central_storage.timeline",
    "central_storage.torch",
}

#: What may be at most: lines of a module, lines of a function, methods of a class that is no facade.
MODULE, FUNCTION, CLASS = 600, 60, 40
#: What is larger still. The table only gets shorter, and its numbers smaller.
LARGER: dict[str, int] = {}


def contracts() -> dict[str, str]:
    """The name of each contract in pyproject.toml by its id."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {contract["id"]: contract["name"] for contract in settings["tool"]["importlinter"]["contracts"]}


def lint_imports(tree: Path) -> Ended:
    """The verdict on the packages in ``tree``, by its own pyproject.toml."""
    path = ":".join(str(tree / role) for role in ROLES)
    command = (str(Path(sys.executable).with_name("lint-imports")), "--no-cache")
    return run(*command, directory=tree, environment={"PYTHONPATH": path, "COLUMNS": "200"})


def copy_of_tree(place: Path) -> Path:
    for role in ROLES:
        shutil.copytree(ROOT / role, place / role, ignore=shutil.ignore_patterns("__pycache__", "README.md"))
    shutil.copy(ROOT / "pyproject.toml", place)
    return place


def test_no_name_of_a_module_is_given_twice() -> None:
    """A second constant of one name changes the first, and nothing else notices."""
    for path, tree in (each for role in ROLES for each in _trees(role)):
        names = [
            name.id
            for statement in tree.body
            if isinstance(statement, ast.Assign | ast.AnnAssign)
            for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
            for name in (target.elts if isinstance(target, ast.Tuple) else [target])
            if isinstance(name, ast.Name)
        ]
        assert len(names) == len(set(names)), (path, sorted(names))


def test_the_public_names_are_these() -> None:
    assert sorted(central_storage.__all__) == sorted(PUBLIC.split())
    assert all(hasattr(central_storage, name) for name in central_storage.__all__)
    assert sorted(name for name in dir(central_storage) if not name.startswith("__")) == sorted(PUBLIC.split())


def test_a_star_import_takes_the_public_names() -> None:
    found: dict[str, object] = {}
    exec("from central_storage import *", found)
    assert found.keys() - {"__builtins__"} == set(central_storage.__all__)


def test_a_supervisor_starts_without_numpy_and_without_what_users_import() -> None:
    said = "import sys; print(*sorted(name for name in sys.modules if name in ('numpy', 'zmq', 'optree')))"
    for entry in ("background", "cli"):
        ended = run(sys.executable, "-c", f"import central_storage.launch.{entry}; {said}").ok()
        assert not ended.out.strip()


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'central_storage' has no attribute 'tf'"):
        _ = central_storage.tf  # type: ignore[attr-defined]


@pytest.mark.parametrize("folder", [*ROLES, "tests", "docs"])
def test_every_folder_says_what_it_is(folder: str) -> None:
    lines = (ROOT / folder / "README.md").read_text().splitlines()
    assert 5 <= len(lines) <= 100


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_a_source_root_of_its_packages(role: str) -> None:
    assert not (ROOT / role / "__init__.py").exists()
    packages = {path.parent.name for path in (ROOT / role).glob("*/__init__.py")}
    assert packages == PACKAGES[role]


def test_the_contracts_hold() -> None:
    verdict = lint_imports(ROOT).ok()
    assert f"Contracts: {len(contracts())} kept, 0 broken." in verdict.out


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The verdict on a copy in which every contract is broken, each by one line in a file of its own."""
    tree = copy_of_tree(tmp_path_factory.mktemp("broken"))
    for name, line in BROKEN.values():
        with (tree / name).open("a") as file:
            file.write(f"\n{line}\n")
    return lint_imports(tree)


@pytest.mark.parametrize("contract", sorted(BROKEN))
def test_a_broken_contract_is_seen(broken: Ended, contract: str) -> None:
    name, line = BROKEN[contract]
    module = ".".join(Path(name).with_suffix("").parts[1:])
    section = broken.out.rpartition(f"\n{contracts()[contract]}\n")[2]
    assert f"{contracts()[contract]} BROKEN" in broken.out, broken
    assert re.search(rf"{re.escape(module)} -> {line.split()[1]} ", section), section


def test_every_contract_has_such_a_line() -> None:
    assert sorted(BROKEN) == sorted(contracts())


def test_a_module_in_no_layer_is_seen(tmp_path: Path) -> None:
    tree = copy_of_tree(tmp_path)
    (tree / "server/cs_server/unheard_of.py").write_text('"""A module that nobody gave a place."""\n')
    verdict = lint_imports(tree)
    assert verdict.code == 1
    assert "unheard_of" in verdict.out


def test_every_package_gives_all_its_modules_a_layer() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layered = {container for each in contracts if each.get("exhaustive") for container in each["containers"]}
    assert layered == EXHAUSTIVE


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for type checkers count, too: who reads one module of a circle has to read all."""
    graph = grimp.build_graph("cs_proto", "cs_runtime", "cs_server", "cs_worker", "central_storage", cache_dir=None)
    order = TopologicalSorter({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})
    order.prepare()  # raises CycleError, which names the circle


def test_nothing_is_imported_by_a_name_that_contracts_do_not_see() -> None:
    """The exceptions import what cannot be known before: what a script asks for, which command cs-ctl is given, what a
    pickle names, and what the supervisor says that a process will be."""
    calls = re.compile(r"\b_?(?:import_module|__import__|spec_from_file_location|exec_module)\(")
    found = {
        str(path.relative_to(ROOT))
        for role in ROLES
        for path in (ROOT / role).rglob("*.py")
        if calls.search(path.read_text())
    }
    assert found == {
        "client/central_storage/__init__.py",
        "client/central_storage/ctl/cli.py",
        "client/central_storage/pickling/reconstruct.py",
        "proto/cs_runtime/standby.py",
    }


def test_modules_functions_and_classes_are_small() -> None:
    """A class may have more methods if it is a facade and says so in its docstring."""
    too_large = {
        f"{path.relative_to(ROOT)}{name}": size
        for role in ROLES
        for path, tree in _trees(role)
        for name, size in _too_large(path, tree)
    }
    assert {name: size for name, size in too_large.items() if size > LARGER.get(name, 0)} == {}
    assert LARGER.keys() - too_large.keys() == set()  # an entry that is not needed any more goes


def _too_large(path: Path, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What exceeds a limit in a file: nothing for the module, or a space and the qualified name; and its size."""
    lines = len(path.read_text().splitlines())
    if lines > MODULE:
        yield "", lines
    around: list[tuple[str, ast.AST]] = [(" ", tree)]
    while around:
        prefix, node = around.pop()
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                around.append((prefix, child))
                continue
            around.append((f"{prefix}{child.name}.", child))
            if isinstance(child, ast.ClassDef):
                size, limit = (
                    sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in child.body),
                    CLASS,
                )
                limit = size if "facade" in (ast.get_docstring(child) or "") else limit
            else:
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                size, limit = (child.end_lineno or first) - first + 1, FUNCTION
            if size > limit:
                yield f"{prefix}{child.name}", size


@pytest.mark.parametrize(
    ("library", "importers"),
    [
        (
            "zmq",
            {
                "central_storage.aio",
                "central_storage.cluster.link",
                "central_storage.cluster.sockets",
                "central_storage.cluster.stand_in",
                "central_storage.gateway.relay",
                "cs_runtime.transport.admission",
                "cs_runtime.transport.channel",
                "cs_runtime.transport.curve",
                "cs_runtime.transport.multipart",
                "cs_runtime.transport.poller",
                "central_storage.observer.blocking",
                "central_storage.observer.connection",
                "central_storage.observer.places",
            },
        ),
        ("cupy", {"cs_server.gpu.cuda", "cs_worker.devices.device"}),
        ("numba", {"cs_server.compute.jit"}),
        ("cloudpickle", {"central_storage.pickling.pickler"}),
        (
            "jax",
            {
                "central_storage.jax.nodes",
                "central_storage.jax.state",
                "central_storage.jax.step",
                "central_storage.jax.tracing",
                "central_storage.jax.trees",
                "central_storage.random",
            },
        ),
        ("optax", {"central_storage.jax.optimizer", "central_storage.jax.state"}),
        (
            "ray",
            {
                "central_storage.ray.connection",
                "central_storage.ray.data",
                "central_storage.ray.host",
                "central_storage.ray.placer",
                "central_storage.ray.row_server",
                "central_storage.ray.seat",
                "central_storage.ray.train",
            },
        ),
        ("prometheus_client", {"central_storage.exporter.families"}),
        ("tensorboardX", {"central_storage.summary"}),
        ("tqdm", {"central_storage.diagnostics.bars"}),
    ],
)
def test_one_module_of_a_role_knows_an_outside_thing(library: str, importers: set[str]) -> None:
    found = set()
    for role in ROLES:
        for path, tree in _trees(role):
            if library in _imports(tree):
                found.add(".".join(path.relative_to(ROOT / role).with_suffix("").parts))
    assert found == importers


@cache
def _trees(role: str) -> list[tuple[Path, ast.Module]]:
    """Each module of a role, read and parsed."""
    return [(path, ast.parse(path.read_text())) for path in sorted((ROOT / role).rglob("*.py"))]


@cache
def _imports(tree: ast.Module) -> set[str]:
    """The top-level names of everything that a module imports, wherever in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").partition(".")[0])
    return names
