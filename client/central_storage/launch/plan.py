"""What a run consists of: the command line and environment of each process, as values.

Pure: options go in, a list of commands comes out; nothing is started and no environment is read. The supervisor
starts what stands here, whatever it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import groupby

from central_storage.core.recovery_options import Recovery
from central_storage.diagnostics.error_report import ENVIRONMENT
from central_storage.diagnostics.gpu_inventory import shown, user_visible
from cs_proto.frozen import frozen, with_changes
from cs_proto.messages import Role

from .affinity import Machine, Share, shares

__all__ = [
    "PLACE_VARIABLES",
    "THREAD_VARIABLES",
    "Command",
    "Options",
    "error_file",
    "label",
    "next_incarnation",
    "of_incarnation",
    "script_command",
    "service_commands",
    "sidecar_command",
    "standby_commands",
]

#: Each of these libraries starts as many threads as there are cores in every process, unless told otherwise.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)
#: Who sets one of these has an opinion about where threads run.
PLACE_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
# What a script is told about its service means nothing to the processes of a service; nor does what those are told.
_NOT_FOR_SERVICES = ("CS_ADDRESS", "CS_DEVICES", "CS_PARAMETER_DEVICE", "CS_GPUS", "CS_VISIBLE_DEVICES", ENVIRONMENT)


@frozen
class Options:
    """Devices in short form, where the run lives, and what becomes of it when a process dies."""

    devices: tuple[str, ...]
    parameter_device: str
    run_directory: str
    recovery: Recovery = Recovery()


@frozen
class Command:
    """A process to be: what it is, its arguments, its whole environment, and where it may run."""

    role: Role
    rank: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    incarnation: int = 1
    #: The processors it is kept on; on none in particular where there are none.
    processors: frozenset[int] = frozenset()
    #: Its device in short form: of a worker that which computes, of the server that which holds the variables.
    device: str = ""
    #: Whether it waits to be told which process it is; see :mod:`cs_runtime.standby`.
    is_standby: bool = False

    @property
    def label(self) -> str:
        """What stands before its lines: ``server``, ``w0``, ``script``."""
        return label(self.role, self.rank)


def next_incarnation(command: Command) -> Command:
    """The command that starts in its place what is to follow it."""
    argv, number = list(command.argv), command.incarnation + 1
    if "--incarnation" in argv:
        argv[argv.index("--incarnation") + 1] = str(number)
    return with_changes(command, argv=tuple(argv), incarnation=number)


def of_incarnation(command: Command, number: int) -> Command:
    """The command of a later incarnation; ``number`` is no lower than that of ``command``."""
    while command.incarnation < number:
        command = next_incarnation(command)
    return command


def label(role: str, rank: int) -> str:
    """The short name of a process."""
    return f"w{rank}" if role == "worker" else role


def service_commands(
    options: Options, environment: Mapping[str, str], *, python: str, machine: Machine, python_path: str = ""
) -> list[Command]:
    """The server, then a worker for each device.

    ``environment`` is the user's; what it says about threads and where they run is obeyed. Otherwise the workers share
    the cores of ``machine`` between them and the server updates on all of them, since the workers wait while it does;
    libraries have one thread in it, since it calls none that has use for more and NumPy's would look for work while all
    processes start. A worker on GPUs sees these only; the server sees the GPU of the variables or none; a worker on a
    CPU sees what the script sees. ``python_path`` is the PYTHONPATH with which they find the project's packages.

    Raises DeviceError where CUDA cannot show a worker what it is to have.
    """
    kept = {name: value for name, value in environment.items() if name not in _NOT_FOR_SERVICES}
    kept["CS_RUN_DIRECTORY"] = options.run_directory
    kept.setdefault("PYTHONUNBUFFERED", "1")  # lines appear when they are printed, and a killed process loses none
    kept.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in native code leaves a Python stack in the log
    kept.setdefault("PYTHONHASHSEED", "0")  # a worker goes over a set as the one before it did
    if python_path:
        kept["PYTHONPATH"] = python_path
    # -P: the user's directory must not shadow what the services import; workers get the script's path by message.
    module = (python, "-P", "-m")
    replicas = len(options.devices)
    server_threads = _threads_for("NUMBA_NUM_THREADS", environment, machine.cores)
    split = shares(options.devices, machine)
    if any(environment.get(name) for name in PLACE_VARIABLES):
        split = [Share(share.threads) for share in split]
    server = Command(
        "server",
        0,
        (*module, "cs_server", *_server_arguments(options, server_threads)),
        {
            **kept,
            **_thread_variables(environment, 1),
            **_gpu_variables(options.parameter_device, environment, machine),
            "CS_ROLE": "server",
        },
        device=options.parameter_device,
    )
    workers = [
        Command(
            "worker",
            rank,
            (*module, "cs_worker", *_worker_arguments(options, rank)),
            {
                **kept,
                **_thread_variables(environment, share.threads),
                **(_gpu_variables(device, environment, machine) if "gpu:" in device else {}),
                "CS_ROLE": "worker",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(replicas),
                "LOCAL_WORLD_SIZE": str(replicas),
            },
            processors=share.processors,
            device=device,
        )
        for rank, (device, share) in enumerate(zip(options.devices, split, strict=True))
    ]
    return [server, *workers]


def standby_commands(
    workers: int, run_directory: str, environment: Mapping[str, str], *, python: str, python_path: str = ""
) -> list[Command]:
    """A server and so many workers, which import what they need and wait until the devices are known."""
    options = Options(tuple(f"cpu:{rank}" for rank in range(workers)), "cpu:0", run_directory)
    one_core = Machine(1)  # NumPy's threads are started later, on the processors of the process
    commands = service_commands(options, environment, python=python, machine=one_core, python_path=python_path)
    imports = {"server": ("cs_server", "cs_server.serving"), "worker": ("cs_worker", "cs_worker.cli")}
    module = (python, "-P", "-m", "cs_runtime.standby")
    return [
        with_changes(command, argv=(*module, *imports[command.role]), processors=frozenset(), is_standby=True)
        for command in commands
    ]


def _server_arguments(options: Options, threads: str) -> tuple[str, ...]:
    return (
        *("--run-directory", options.run_directory),
        *("--parameter-device", options.parameter_device),
        *("--replicas", str(len(options.devices))),
        *("--threads", threads),
        *("--incarnation", "1"),
        *_recovery_arguments(options.recovery),
    )


def _worker_arguments(options: Options, rank: int) -> tuple[str, ...]:
    return (
        *("--run-directory", options.run_directory),
        *("--replica", str(rank)),
        *("--incarnation", "1"),
        *("--device", options.devices[rank]),
    )


def script_command(
    run_directory: str,
    named: tuple[str | None, str | None],
    environment: Mapping[str, str],
    arguments: Sequence[str],
    *,
    python: str,
) -> Command:
    """The user's script: told where its service is, and no rank, because it runs once.

    ``named`` are the devices and the parameter device of the command line, which the script gets instead of what it
    names itself. ``arguments`` are the interpreter's: ``["train.py", "--rate", "0.1"]`` or ``["-m", "package"]``.
    """
    own = {name: value for name, value in zip(("CS_DEVICES", "CS_PARAMETER_DEVICE"), named, strict=True) if value}
    return Command(
        "script",
        0,
        (python, "-u", *arguments),
        {
            **environment,
            "CS_ROLE": "script",
            "CS_RUN_DIRECTORY": run_directory,
            "CS_ADDRESS": run_directory,
            **own,
            ENVIRONMENT: error_file(run_directory),
        },
    )


def sidecar_command(
    module: str,
    run_directory: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    python: str,
    python_path: str = "",
) -> Command:
    """A process beside the service: ``module`` with ``arguments``. It looks at the service as an observer; libraries
    have one thread in it."""
    kept = {name: value for name, value in environment.items() if name not in (*_NOT_FOR_SERVICES, "CS_ROLE")}
    kept |= {**dict.fromkeys(THREAD_VARIABLES, "1"), "CS_RUN_DIRECTORY": run_directory}
    kept |= {"PYTHONPATH": python_path} if python_path else {}
    return Command("observer", 0, (python, "-P", "-m", module, "--run-directory", run_directory, *arguments), kept)


def error_file(run_directory: str) -> str:
    """Where the script says what exception ended it."""
    return os.path.join(run_directory, "error")


def _recovery_arguments(recovery: Recovery) -> tuple[str, ...]:
    timeout = recovery.step_timeout
    return (
        *("--recovery", "on" if recovery.server_recovery else "off"),
        *(() if timeout is None else ("--step-timeout", str(timeout))),
    )


def _gpu_variables(device: str, environment: Mapping[str, str], machine: Machine) -> dict[str, str]:
    visible = user_visible(environment)
    return {**shown(device, machine.gpus), **({} if visible is None else {"CS_VISIBLE_DEVICES": visible})}


def _thread_variables(environment: Mapping[str, str], share: int) -> dict[str, str]:
    return {name: _threads_for(name, environment, share) for name in THREAD_VARIABLES}


def _threads_for(name: str, environment: Mapping[str, str], share: int) -> str:
    """What the user said by ``name``, else by the variable that most libraries fall back to, else ``share``."""
    if environment.get(name):
        return environment[name]
    general = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return general if general.isdecimal() and int(general) > 0 else str(share)


def places(commands: Sequence[Command]) -> str:
    """The processors of workers that are bound to some of them, for the banner."""
    kept = [
        f"{command.label} on processors {_ranges(command.processors)}" for command in commands if command.processors
    ]
    return f"\nNUMA: {', '.join(kept)}; OMP_PROC_BIND=false switches this off" if kept else ""


def _ranges(processors: frozenset[int]) -> str:
    """``0-3,8`` for a set."""
    # In a run of consecutive numbers, number minus position is constant.
    runs = [list(run) for _, run in groupby(enumerate(sorted(processors)), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs)
