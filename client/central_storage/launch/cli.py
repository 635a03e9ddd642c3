"""The command line of ``cs-launch``: reads it, checks it, hands it to ``foreground``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import NoReturn

from central_storage.core import devices
from central_storage.core.recovery_options import Recovery
from central_storage.diagnostics.error_report import ENVIRONMENT, Failure, Kind, write
from central_storage.diagnostics.logging_setup import configure_logging, dump_stacks_on_signal
from cs_proto.errors import ConfigurationError, DeviceError, LaunchError, NoAnswerError, ShutdownError
from cs_proto.frozen import with_changes
from cs_proto.messages import MOST_REPLICAS, Joined
from cs_runtime.gpus import require_cupy
from cs_runtime.run_file import RunFile

from .affinity import Machine, core_count, machine
from .foreground import START_FAILED, run
from .gpu_usage import busy
from .memory import Files, Medium, Memfd, Unshared
from .packages import python_path
from .plan import Command, Options, of_incarnation, script_command, service_commands
from .remote.serve import serve
from .run_directory import RunDirectory
from .supervisor.lifecycle import transport_of
from .supervisor.mailboxes import mailboxes_by_default
from .supervisor.output import LogFiles

__all__ = ["main"]

_USAGE_ERROR = 2
_CTRL_C = 130
# A health check has a limit of its own around it.
_HEALTH_TIMEOUT = 3.0

_DESCRIPTION = """\
Run a training script with the processes it trains on: one server that holds every variable, and one worker for each
device.

Your script runs ONCE, as the program that says what happens; the workers are services that run the functions it
passes to strategy.run(). It has no RANK and needs no change to run without cs-launch, which starts the same
processes by itself.
"""

_EPILOG = """\
examples:
  cs-launch train.py --epochs 3                            every GPU, or one CPU where there is none
  cs-launch --devices cpu:0,cpu:1 train.py                 two replicas share the processors
  cs-launch --devices gpu:0,gpu:1 --parameter-device cpu:0 -m project.train
  CUDA_VISIBLE_DEVICES=2,3 cs-launch --devices gpu:all train.py     gpu:0 and gpu:1 are the machine's third and fourth

Options of cs-launch come before the script; everything after it is the script's.

in containers, which share the run directory (docker-compose.yml):
  cs-launch --serve 2 --memory files --run-dir DIR         the server; waits for two workers from elsewhere
  cs-launch --join --run-dir DIR                           one worker; its number is given to it
  CS_ADDRESS=DIR python train.py                           the script
  cs-launch --health --run-dir DIR                         a line and exit code 0 where the service serves

environment:
  CS_ADDRESS                     the run directory for --serve, --join, --health
  CS_LOG=debug                   one line for every message
  CS_MESSAGES_DIR                keep these lines in files of that directory, one a process
  CS_LOG_DIR                     as --log-dir, also for a script that is started without cs-launch
  CS_ERROR_FILE                  as --error-file, likewise
  CS_MAILBOXES                   as --mailboxes, likewise
  OMP_NUM_THREADS and its like   obeyed; otherwise the workers share the processors
  OMP_PROC_BIND and its like     obeyed; otherwise a worker stays on the NUMA node of its GPU, and workers that are all
                                 on CPUs spread over the nodes, unless taskset, a cpuset or a quota limits the run
  CUDA_VISIBLE_DEVICES           which GPUs there are (numbers, UUIDs, MIG); gpu:n is the n-th of them. Each worker on
                                 a GPU sees its own alone, so to torch or JAX there it is cuda:0

exit codes:
  0          the script ended well          3          the service did not start
  1-125      the script's own               4, 5       the script failed after a worker, the server did
  2          wrong options                  130, 143   after Ctrl-C, SIGTERM
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """``cs-launch``: the exit code."""
    error_path = os.environ.get(ENVIRONMENT)
    try:
        options = _parser().parse_args(arguments)
        error_path = options.error_file
        if error_path:
            with suppress(OSError):  # of an earlier run
                os.unlink(error_path)
        _check(options)
        if options.health:
            return _health(options)
        configure_logging("supervisor")
        dump_stacks_on_signal()
        if options.join:
            return _join(options)
        return _launch(options) if options.serve is None else _serve(options)
    except (ConfigurationError, DeviceError) as error:
        return _failed("usage", error, _USAGE_ERROR, error_path)
    except LaunchError as error:
        return _failed("start", error, START_FAILED, error_path)
    except KeyboardInterrupt:
        return _CTRL_C


def _failed(kind: Kind, error: Exception, code: int, error_path: str | None) -> int:
    print(f"cs-launch: error: {error}", file=sys.stderr)
    if error_path:
        write(error_path, Failure(kind, "launcher", None, os.getpid(), f"{type(error).__name__}: {error}"), code)
    return code


def _launch(options: argparse.Namespace) -> int:
    arguments = _script_arguments(options)
    compute = devices.compute_devices(_written_out(options.devices, core_count()))
    parameters = devices.parameter_device(options.parameter_device, compute)
    require_cupy([*compute, parameters])
    here = machine()
    run_directory = RunDirectory(options.run_directory, keep=options.keep_run_directory)
    try:
        plan = Options(tuple(compute), parameters, run_directory.path, _recovery(options))
        commands = _commands(plan, here)
        medium = _medium(options, run_directory)
        workers = f"{len(compute)} worker{'s' if len(compute) > 1 else ''}"
        _warn([*compute, parameters], here)
        return run(
            run_directory,
            commands,
            script_command(plan, os.environ, arguments, python=sys.executable),
            banner=f"run {run_directory.name}: 1 script, {workers} ({', '.join(compute)}), parameters on {parameters}, "
            f"transport {_transport(options, medium)}, directory {run_directory.path}{_places(commands)}",
            start_timeout=options.start_timeout,
            logs=_log_files(options, run_directory),
            keeps_logs=bool(options.log_directory or options.keep_run_directory),
            medium=medium,
            recovery=plan.recovery,
            mailboxes=options.mailboxes == "on",
            error_path=options.error_file,
        )
    finally:
        run_directory.remove()


def _serve(options: argparse.Namespace) -> int:
    parameters = devices.parameter_device(options.parameter_device, ["cpu:0"])
    require_cupy([parameters])
    here = machine()
    # Where the memory outlives this process, another one may take up what it leaves.
    begun = RunFile(os.urandom(8).hex(), options.serve, parameters, options.return_timeout, 1, (1,) * options.serve)
    is_kept = options.memory == "files" and options.server_recovery == "on"
    run_directory = RunDirectory(
        options.run_directory or _address(),
        keep=options.keep_run_directory,
        is_taken_up=lambda directory: is_kept and _goes_on(directory, begun),
    )
    try:
        before = RunFile.read(run_directory.path)
        medium = _medium(options, run_directory)
        # Which devices they have is for the workers to say.
        plan = Options(("elsewhere",) * options.serve, parameters, run_directory.path, _recovery(options))
        _warn([parameters], here)
        commands, again = _commands(plan, here), ""
        if before is not None:
            numbers = (before.server + 1, *before.workers)
            commands = [of_incarnation(command, number) for command, number in zip(commands, numbers, strict=True)]
            again = "; it goes on with what the supervisor before it has left"
        return serve(
            run_directory,
            commands,
            banner=f"run {run_directory.name}: {options.serve} workers from elsewhere, parameters on {parameters}, "
            f"transport {_transport(options, medium)}, directory {run_directory.path}{again}",
            start_timeout=options.start_timeout,
            logs=LogFiles.under(options.log_directory, run_directory.path) if options.log_directory else None,
            medium=medium,
            recovery=plan.recovery,
            run_file=with_changes(before, return_timeout=begun.return_timeout)
            if before
            else begun
            if is_kept
            else None,
            mailboxes=options.mailboxes == "on",
            error_path=options.error_file,
        )
    except OSError as error:
        raise LaunchError(f"what lies in {run_directory.path} cannot be used: {error.strerror}") from error
    finally:
        run_directory.remove()


def _goes_on(directory: str, begun: RunFile) -> bool:
    """Whether the run that was left in ``directory`` can go on as the one that was to begin there."""
    left = RunFile.read(directory)
    if left is None or not left.serves:
        return False
    if (left.replicas, left.parameter_device) == (begun.replicas, begun.parameter_device):
        return True
    print(
        f"cs-launch: warning: a run of {left.replicas} workers with parameters on {left.parameter_device} was killed "
        f"in {directory}; it is dropped, since this one is of {begun.replicas} and on {begun.parameter_device}",
        file=sys.stderr,
    )
    return False


def _join(options: argparse.Namespace) -> int:
    run_directory = options.run_directory or _address()
    is_any = options.devices is None or [name.lower() for name in options.devices] == ["auto"]
    chosen = devices.compute_devices(_written_out(options.devices, 1))
    if len(chosen) > 1:
        raise ConfigurationError(
            f"--join runs one worker, not one for each of {', '.join(chosen)}; say which by --devices, and start more"
        )
    require_cupy(chosen)
    here = machine()
    _warn(chosen, here)

    def command_of(joined: Joined) -> Command:
        # Processors are all alike; their numbers tell the replicas apart.
        device = f"cpu:{joined.rank}" if is_any and chosen == ["cpu:0"] else chosen[0]
        everyone = ["elsewhere"] * joined.replicas
        everyone[joined.rank] = device
        return _commands(Options(tuple(everyone), "cpu:0", run_directory), here)[1 + joined.rank]

    from .remote.join import join  # and NumPy, as below, without which a supervisor does

    return join(run_directory, command_of, options.start_timeout)


def _health(options: argparse.Namespace) -> int:
    from .remote.health import health

    try:
        print(health(options.run_directory or _address(), _HEALTH_TIMEOUT))
    except (LaunchError, NoAnswerError, ShutdownError) as error:
        print(f"not healthy: {error}")
        return 1
    return 0


def _check(options: argparse.Namespace) -> None:
    modes = [name for name in ("serve", "join", "health") if getattr(options, name) not in (None, False)]
    if len(modes) > 1 or (modes and (options.command or options.module is not None)):
        raise ConfigurationError(f"--{modes[0]} runs no script and goes with no other of --serve, --join, --health")
    if not 0 < options.start_timeout < 1e6:
        raise ConfigurationError(
            f"--start-timeout must be more than 0 seconds, less than 1e6, not {options.start_timeout:g}"
        )
    if not 0 < options.return_timeout < 1e6:
        raise ConfigurationError(
            f"--return-timeout must be more than 0 seconds, less than 1e6, not {options.return_timeout:g}"
        )
    _recovery(options)
    if options.serve is not None and not 1 <= options.serve <= MOST_REPLICAS:
        raise ConfigurationError(f"--serve {options.serve}: there are between 1 and {MOST_REPLICAS} workers")


def _address() -> str:
    address = os.environ.get("CS_ADDRESS")
    if not address:
        raise ConfigurationError("where is the service? pass --run-dir, or set CS_ADDRESS to its run directory")
    return address


def _medium(options: argparse.Namespace, run_directory: RunDirectory) -> Medium:
    if options.memory == "files":
        return Files(run_directory.path)
    return Memfd(run_directory.name) if options.memory == "memfd" else Unshared()


def _transport(options: argparse.Namespace, medium: Medium) -> str:
    return transport_of(medium, mailboxes=options.mailboxes == "on")


def _recovery(options: argparse.Namespace) -> Recovery:
    return Recovery(options.max_restarts, options.server_recovery == "on", options.step_timeout)


def _commands(plan: Options, here: Machine) -> list[Command]:
    return service_commands(plan, os.environ, python=sys.executable, machine=here, python_path=python_path(os.environ))


def _written_out(chosen: list[str] | None, cores: int) -> list[str] | None:
    return None if chosen is None else devices.expanded(chosen, cores)


def _warn(used: list[str], here: Machine) -> None:
    for line in busy(used, here.gpus):
        print(f"cs-launch: warning: {line}", file=sys.stderr)


def _places(commands: list[Command]) -> str:
    """Where workers are kept on a part of the processors, for the banner."""
    kept = [
        f"{command.label} on processors {_ranges(command.processors)}" for command in commands if command.processors
    ]
    return f"\nNUMA: {', '.join(kept)}; OMP_PROC_BIND=false switches that off" if kept else ""


def _ranges(processors: frozenset[int]) -> str:
    """``0-3,8`` for a set."""
    # Where numbers follow each other, number minus place is one and the same.
    runs = [list(run) for _, run in groupby(enumerate(sorted(processors)), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs)


def _script_arguments(options: argparse.Namespace) -> list[str]:
    if options.module is not None:
        if not options.module:
            raise ConfigurationError("-m needs the name of a module")
        return ["-m", *options.module]
    if not options.command:
        raise ConfigurationError("which script? cs-launch [options] script.py [arguments]; see cs-launch --help")
    script = options.command[0]
    if not Path(script).exists():
        raise ConfigurationError(f"there is no script {script!r} in {os.getcwd()}")
    return list(options.command)


def _log_files(options: argparse.Namespace, run_directory: RunDirectory) -> LogFiles:
    """Whole log files: in the run directory, which goes at the end unless it is kept, or where the user wants them."""
    if options.log_directory:
        return LogFiles.under(options.log_directory, run_directory.path)
    return LogFiles(os.path.join(run_directory.path, "logs"))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; see cs-launch --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "cs-launch",
        usage="cs-launch [options] script.py [arguments]\n       cs-launch [options] -m module [arguments]\n"
        "       cs-launch [options] --serve N | --join | --health",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_processes(parser)
    _add_places(parser)
    parser.add_argument("--serve", type=int, metavar="N", help="no script: a server for N workers from elsewhere")
    parser.add_argument(
        "--return-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="with --serve --memory files: how long workers and script wait for this launcher to be started again "
        "after it was killed, with its container or alone (default: 60)",
    )
    parser.add_argument("--join", action="store_true", help="no script: one worker of a service elsewhere")
    parser.add_argument("--health", action="store_true", help="no script: ask whether the service serves")
    parser.add_argument(
        "--keep-run-directory", action="store_true", help="leave the run directory, with log files, when the run ends"
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m does")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_processes(parser: argparse.ArgumentParser) -> None:
    """The options of the devices, and of what is done when a process is late or dies."""
    parser.add_argument(
        "--devices",
        type=_device_list,
        metavar="LIST",
        help="one device per worker, like cpu:0,cpu:1 or gpu:0,gpu:1, or several, like gpu:0+gpu:1,gpu:2+gpu:3; "
        "gpu:all: every GPU; auto: every GPU, else a CPU for each core, at most 8 (default: every GPU, else cpu:0)",
    )
    parser.add_argument(
        "--parameter-device",
        metavar="DEVICE",
        help="where the variables lie (default: the only device, or cpu:0 where there are several)",
    )
    parser.add_argument(
        "--start-timeout", type=float, default=60.0, metavar="SECONDS", help="limit of the start (default: 60)"
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=Recovery.max_restarts,
        metavar="N",
        help="how often, in all, a worker or server that has died is started again (default: %(default)s)",
    )
    parser.add_argument(
        "--step-timeout",
        type=float,
        metavar="SECONDS",
        help="kill and start again a worker that is waited for and of which nothing was heard for so long "
        "(default: never; a wait is named every 10 s)",
    )
    parser.add_argument(
        "--server-recovery",
        choices=("on", "off"),
        default="on",
        help="whether the death of the server is survived, which makes large dense updates slower (default: on)",
    )


def _add_places(parser: argparse.ArgumentParser) -> None:
    """The options of files, memory and messages."""
    parser.add_argument(
        "--log-dir",
        dest="log_directory",
        metavar="DIR",
        default=os.environ.get("CS_LOG_DIR"),
        help="keep all output of server and workers in DIR/cs-<run>/ (default: CS_LOG_DIR, else nowhere)",
    )
    parser.add_argument(
        "--error-file",
        metavar="FILE",
        default=os.environ.get(ENVIRONMENT),
        help="where to leave, as JSON, what failed first: role, rank, pid, cause, last lines, exit code "
        "(default: CS_ERROR_FILE, else nowhere)",
    )
    parser.add_argument(
        "--run-dir", dest="run_directory", metavar="DIR", help="directory of the sockets (default: a fresh one)"
    )
    parser.add_argument(
        "--memory",
        choices=("memfd", "files", "frames"),
        default="memfd",
        help="where the variables' memory is: shared memory of the kernel's own, or files in the run directory, which "
        "is then on a tmpfs; or not shared at all: every byte is sent in a message (default: memfd)",
    )
    parser.add_argument(
        "--mailboxes",
        choices=("on", "off"),
        default=mailboxes_by_default(),
        help="whether the messages of a step go through shared memory, where that is possible, or over ZeroMQ like all "
        "others (default: CS_MAILBOXES, else on)",
    )


def _device_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    sys.exit(main())
