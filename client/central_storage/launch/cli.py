"""The command line of ``cs-launch``: reads it, checks it, hands it to ``foreground``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

from central_storage.core.check_numerics import CHECKS, check_of
from central_storage.core.check_numerics import ENVIRONMENT as CHECK
from central_storage.core.devices import device_names
from central_storage.core.recovery_options import Recovery
from central_storage.diagnostics.error_report import ENVIRONMENT, Failure, Kind, write
from central_storage.diagnostics.logging_setup import configure_logging, dump_stacks_on_signal
from cs_proto.errors import ConfigurationError, DeviceError, LaunchError, NoAnswerError, ShutdownError
from cs_proto.frozen import with_changes
from cs_proto.messages import MOST_REPLICAS, DeviceChoice
from cs_proto.printable import counted, printable
from cs_proto.version import __version__
from cs_runtime.gpus import require_cupy
from cs_runtime.run_file import RunFile
from cs_runtime.trace import is_on

from . import join_options, listen_options, metrics_options, plan_options, ray_options
from .affinity import Machine, core_count, machine
from .foreground import START_FAILED, Plan, run
from .memory import Files, Medium, Memfd, Unshared
from .packages import python_path
from .plan import Command, Options, of_incarnation, places, script_command, service_commands, standby_commands
from .remote.serve import serve, start_child
from .run_directory import RunDirectory
from .service_file import ServiceFile, typed
from .sidecar import Beside
from .supervisor.children import Child
from .supervisor.mailboxes import mailboxes_by_default, transport_of
from .supervisor.output import KEPT_NBYTES, LogFiles

__all__ = ["main"]

_USAGE_ERROR = 2
_CTRL_C = 130
# Seconds. A container's health check has a longer limit, so this one ends with a message first.
_HEALTH_TIMEOUT = 3.0

_DESCRIPTION = """\
Run a training script together with its service: one server, which holds every variable, and one worker for each
device.

Your script runs ONCE and controls the training; the workers run the functions that it passes to strategy.run(). It has
no RANK, and it needs no change to run without cs-launch: it then starts the same processes itself.
"""

_EPILOG = """\
examples:
  cs-launch train.py --epochs 3                            what the script names; else every GPU, or one CPU
  cs-launch --devices cpu:0,cpu:1 train.py                 two replicas share the processors
  cs-launch --devices gpu:0,gpu:1 --parameter-device cpu:0 -m project.train
  CUDA_VISIBLE_DEVICES=2,3 cs-launch --devices gpu:all train.py     gpu:0 and gpu:1 are the machine's third and fourth

Options of cs-launch come before the script; all arguments after it go to the script.

in containers that share the run directory (docker-compose.yml):
  cs-launch --serve 2 --memory files --run-dir DIR         the server; waits until two workers have joined
  cs-launch --join --run-dir DIR                           one worker; the service gives it its number
  CS_ADDRESS=DIR python train.py                           the script
  cs-launch --health --run-dir DIR                         prints one line; exit code 0 if the service is ready

workers on other machines:
  cs-launch keys DIR --worker NAME                         makes the keys of the service and of one worker
  cs-launch --serve 2 --listen tcp://192.0.2.7:5600 --keys DIR train.py
  cs-launch --join tcp://192.0.2.7:5600 --keys DIR         one worker, on each of two other machines; or a worker on
                                                           each of --devices, if its key was made with --places

workers on the machines of a Ray cluster:
  cs-launch --ray auto --workers 8 train.py                8 workers where Ray has room; local:3 tries it on one machine
  cs-launch --ray auto --workers 8 --plan train.py         what a step would take there; trains nothing

observers on other machines, which may only read:
  cs-launch keys DIR                                       makes the keys of the service and of one observer
  cs-launch --listen tcp://192.0.2.7:5600 --keys DIR train.py

environment:
  CS_DEVICES                     as --devices; also for a script that runs without cs-launch and names none
  CS_PARAMETER_DEVICE            as --parameter-device, in the same way
  CS_ADDRESS                     the run directory for --serve, --join, --health
  CS_LOG=debug                   print one line for every message; warning: not the line with the devices; error: no
                                 warnings either
  CS_MESSAGES_DIR                write these lines to files in that directory, one for each process
  CS_LOG_VALUES=on               show the bytes of arguments and results in these lines (default: only their number)
  CS_NAME_WAITS=60               name a wait after so many seconds (default: 10), then at growing intervals; off: never
  CS_CACHE_DIR                   the directory of the compiled kernels (default: ~/.cache/central-storage)
  CS_LOG_DIR                     as --log-dir; also for a script that runs without cs-launch
  CS_ERROR_FILE                  as --error-file; also for a script that runs without cs-launch
  CS_TIMELINE                    as --timeline; also for a script that runs without cs-launch
  CS_CHECK_NUMERICS              as --check-numerics; also for a script that runs without cs-launch and names none
  CS_TIMES=off                   keep no step times, which profiles and timelines need (default: on)
  CS_MAILBOXES                   as --mailboxes; also for a script that runs without cs-launch
  OMP_NUM_THREADS and similar    if set, they are respected; otherwise the workers share the processors
  OMP_PROC_BIND and similar      if set, they are respected; otherwise a worker runs on the NUMA node of its GPU, and
                                 workers that are all on CPUs are spread over the nodes, unless taskset, a cpuset or a
                                 quota limits the run
  CUDA_VISIBLE_DEVICES           the GPUs to use (numbers, UUIDs, MIG instances); gpu:n is the n-th of them. Each
                                 worker on a GPU sees only its own GPU, so torch or JAX there calls it cuda:0

exit codes:
  0          the script ended well          3          the service did not start
  1-125      the script's own               4, 5       the script failed because a worker (4) or the server (5) died
  2          invalid options                130, 143   Ctrl-C, SIGTERM
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``cs-launch`` and return its exit code."""
    error_path = os.environ.get(ENVIRONMENT)
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if words[:1] == ["keys"]:
            return listen_options.keys(words[1:])
        options = _parser().parse_args(words)
        error_path = options.error_file
        if error_path:
            with suppress(OSError):  # of an earlier run
                os.unlink(error_path)
        _check(options)
        if options.health:
            return _health(options)
        if options.doctor:
            return _doctor()
        if options.plan:
            plan_options.plan(options, _script_arguments(options))
        configure_logging("supervisor")
        dump_stacks_on_signal()
        if options.join is not None:
            return join_options.join(options, _address)
        with ExitStack() as undo:
            is_alone = options.serve is not None and not _has_script(options)
            return _serve(options, undo) if is_alone else _launch(options, undo)
    except (ConfigurationError, DeviceError) as error:
        return _failed("usage", error, _USAGE_ERROR, error_path)
    except LaunchError as error:
        return _failed("start", error, START_FAILED, error_path)
    except KeyboardInterrupt:
        return _CTRL_C


def _failed(kind: Kind, error: Exception, code: int, error_path: str | None) -> int:
    print(printable(f"cs-launch: error: {error}", lines=True), file=sys.stderr)
    if error_path:
        write(error_path, Failure(kind, "launcher", None, os.getpid(), f"{type(error).__name__}: {error}"), code)
    return code


def _launch(options: argparse.Namespace, undo: ExitStack) -> int:
    arguments = _script_arguments(options)
    here = machine()
    if options.ray is not None:
        options.serve = options.workers
    is_elsewhere = options.serve is not None  # the workers name their devices when they join
    devices = None if is_elsewhere else options.devices
    compute = ["elsewhere"] * options.serve if is_elsewhere else device_names.compute_devices(devices, core_count())
    parameters = device_names.parameter_device(options.parameter_device, ["cpu:0"] if is_elsewhere else compute)
    named = ",".join(compute) if devices else None, parameters if options.parameter_device else None
    is_chosen = is_elsewhere or bool(devices)
    run_directory = RunDirectory(options.run_directory, keep=options.keep_run_directory)
    try:
        medium = _medium(options, run_directory)
        sidecars, announced, shown = _sidecars(options, run_directory, undo)

        def planned(choice: DeviceChoice | None) -> Plan:
            if choice is None:
                chosen, owner = compute, parameters
            else:
                chosen = device_names.compute_devices(choice.devices, core_count())
                owner = device_names.parameter_device(choice.parameter_device, chosen)
            require_cupy([*chosen, owner])
            join_options.warn_of_busy([*chosen, owner], here)
            commands = _commands(Options(tuple(chosen), owner, run_directory.path, _recovery(options)), here)
            workers = counted(len(chosen), "worker")
            workers += " from elsewhere" if is_elsewhere else f" ({', '.join(chosen)})"
            banner = (
                f"run {run_directory.name}: 1 script, {workers}, parameters on {owner}, "
                f"transport {_transport(options, medium)}, directory {run_directory.path}"
                f"{places(commands)}{announced}"
            )
            return Plan(commands, banner, tuple(chosen), owner)

        plan = planned(None) if is_chosen else Plan(_standbys(run_directory.path), "")
        logs = _log_files(options, run_directory)
        known = (compute, parameters) if is_chosen else ((), "")
        logged = logs.directory if logs else None
        file = ServiceFile.of(run_directory.path, typed(arguments), "launcher", *known, log_directory=logged, **shown)
        return run(
            run_directory,
            plan,
            script_command(run_directory.path, named, _environment(options), arguments, python=sys.executable),
            choose=None if is_chosen else planned,
            start_timeout=options.start_timeout,
            logs=logs,
            service_file=file,
            keeps_logs=bool(options.log_directory or options.keep_run_directory),
            medium=medium,
            recovery=_recovery(options),
            mailboxes=options.mailboxes == "on",
            error_path=options.error_file,
            sidecars=sidecars,
            stop_grace=options.stop_grace,
            start_child=start_child if is_elsewhere else Child,
        )
    finally:
        run_directory.remove()


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """What the script gets, but for what the plan adds."""
    named = {} if options.timeline is None else {"CS_TIMELINE": os.path.abspath(options.timeline)}
    if options.check_numerics is not None:
        named[CHECK] = options.check_numerics
    return {**os.environ, **named}


def _serve(options: argparse.Namespace, undo: ExitStack) -> int:
    parameters = device_names.parameter_device(options.parameter_device, ["cpu:0"])
    require_cupy([parameters])
    here = machine()
    # If the memory outlives this process, the next one may take up the run.
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
        sidecars, announced, shown = _sidecars(options, run_directory, undo)
        # The workers name their devices when they join.
        plan = Options(("elsewhere",) * options.serve, parameters, run_directory.path, _recovery(options))
        join_options.warn_of_busy([parameters], here)
        commands, again = _commands(plan, here), ""
        if before is not None:
            numbers = (before.server + 1, *before.workers)
            commands = [of_incarnation(command, number) for command, number in zip(commands, numbers, strict=True)]
            again = "; it takes up the run of the supervisor that was killed"
        logs = LogFiles.under(options.log_directory, run_directory.path) if options.log_directory else None
        file = ServiceFile.of(
            run_directory.path,
            f"--serve {options.serve}",
            "serve",
            parameter_device=parameters,
            log_directory=logs.directory if logs else None,
            **shown,
        )
        file.write(run_directory.path)
        return serve(
            run_directory,
            commands,
            banner=f"run {run_directory.name}: {counted(options.serve, 'worker')} from elsewhere, parameters on "
            f"{parameters}, transport {_transport(options, medium)}, directory {run_directory.path}{again}{announced}",
            start_timeout=options.start_timeout,
            logs=logs,
            medium=medium,
            recovery=plan.recovery,
            run_file=with_changes(before, return_timeout=begun.return_timeout)
            if before
            else begun
            if is_kept
            else None,
            mailboxes=options.mailboxes == "on",
            error_path=options.error_file,
            sidecars=sidecars,
        )
    except OSError as error:
        raise LaunchError(f"the files in {run_directory.path} cannot be used: {error.strerror}") from error
    finally:
        run_directory.remove()


def _sidecars(
    options: argparse.Namespace, run_directory: RunDirectory, undo: ExitStack
) -> tuple[list[Beside], str, dict[str, Any]]:
    """The processes beside the service, what the banner says of them, and what ``cs-ctl`` shows of them."""
    placers, workers = ray_options.placer_of(options, run_directory.path, undo)
    exporter, metrics, where = metrics_options.exporter_of(options, run_directory.path, undo)
    gateway, observers, address = listen_options.gateway_of(options, run_directory.path, undo)
    for placer in placers:
        placer.listens_at(address["listen"])
    return [*exporter, *gateway, *placers], workers + metrics + observers, where | address


def _goes_on(directory: str, begun: RunFile) -> bool:
    """Whether this process can continue the run that a killed one left in ``directory``."""
    left = RunFile.read(directory)
    if left is None or not left.serves:
        return False
    if (left.replicas, left.parameter_device) == (begun.replicas, begun.parameter_device):
        return True
    print(
        f"cs-launch: warning: a run of {counted(left.replicas, 'worker')} with parameters on {left.parameter_device} "
        f"was killed in {directory}; it is dropped, because this run has {counted(begun.replicas, 'worker')} and "
        f"parameters on {begun.parameter_device}",
        file=sys.stderr,
    )
    return False


def _health(options: argparse.Namespace) -> int:
    from .remote.health import health

    try:
        print(printable(health(options.run_directory or _address(), _HEALTH_TIMEOUT)))
    except (LaunchError, NoAnswerError, ShutdownError) as error:
        print(printable(f"not healthy: {error}", lines=True))
        return 1
    return 0


def _doctor() -> int:
    from . import checks  # it imports NumPy, which a supervisor does not need

    found = list(checks.findings())
    print(*(printable(line) for finding in found for line in checks.lines(finding)), checks.summary(found), sep="\n")
    return int(any(finding.level == "bad" for finding in found))


def _check(options: argparse.Namespace) -> None:
    modes = [name for name in ("serve", "join", "health", "doctor") if getattr(options, name) not in (None, False)]
    may_have_script = not modes or (modes == ["serve"] and (options.listen is not None or options.plan))
    if len(modes) > 1 or (_has_script(options) and not may_have_script):
        raise ConfigurationError(
            f"--{modes[0]} takes no script, and only one of --serve, --join, --health, --doctor may be given"
        )
    for name, value in (("start", options.start_timeout), ("return", options.return_timeout)):
        if not 0 < value < 1e6:
            raise ConfigurationError(f"--{name}-timeout must be more than 0 and less than 1e6 seconds, not {value:g}")
    if not 0 <= options.stop_grace < 1e6:
        raise ConfigurationError(
            f"--stop-grace must be at least 0 and less than 1e6 seconds, not {options.stop_grace:g}"
        )
    if modes and options.timeline is not None:
        raise ConfigurationError(
            f"--timeline is recorded by a script, and --{modes[0]} runs none; set CS_TIMELINE where the script runs"
        )
    if options.timeline is not None and not (directory := Path(options.timeline).absolute().parent).is_dir():
        raise ConfigurationError(f"--timeline {options.timeline}: there is no directory {directory}")
    metrics_options.check(options, modes)
    listen_options.check(options, modes)
    join_options.check(options)
    ray_options.check(options, modes)
    plan_options.check(options, modes)
    if modes and options.check_numerics is not None:
        raise ConfigurationError(
            f"--check-numerics is said by a script, and --{modes[0]} runs none; set {CHECK} where the script runs"
        )
    check_of(None)  # CS_CHECK_NUMERICS
    is_on()  # CS_TIMES
    _recovery(options)
    if options.serve is not None and not 1 <= options.serve <= MOST_REPLICAS:
        raise ConfigurationError(f"--serve takes a number of workers from 1 to {MOST_REPLICAS}, not {options.serve}")


def _address() -> str:
    address = os.environ.get("CS_ADDRESS")
    if not address:
        raise ConfigurationError(
            "no run directory was given; pass --run-dir, or set CS_ADDRESS to the run directory of the service"
        )
    return address


def _medium(options: argparse.Namespace, run_directory: RunDirectory) -> Medium:
    if options.memory == "files":
        return Files(run_directory.path)
    return Memfd(run_directory.name) if options.memory == "memfd" else Unshared()


def _transport(options: argparse.Namespace, medium: Medium) -> str:
    return transport_of(medium, mailboxes=options.mailboxes == "on")


def _recovery(options: argparse.Namespace) -> Recovery:
    # The end of the gateway, or of the network, costs each worker on another machine a restart.
    times = options.serve if options.serve and (options.listen or options.ray) else 1
    most = Recovery.max_restarts * times if options.max_restarts is None else options.max_restarts
    return Recovery(most, options.server_recovery == "on", options.step_timeout)


def _commands(plan: Options, here: Machine) -> list[Command]:
    return service_commands(plan, os.environ, python=sys.executable, machine=here, python_path=python_path(os.environ))


def _standbys(run_directory: str) -> list[Command]:
    """As many as ``auto`` would start."""
    workers = len(device_names.compute_devices("auto", core_count()))
    return standby_commands(
        workers, run_directory, os.environ, python=sys.executable, python_path=python_path(os.environ)
    )


def _has_script(options: argparse.Namespace) -> bool:
    return bool(options.command) or options.module is not None


def _script_arguments(options: argparse.Namespace) -> list[str]:
    if options.module is not None:
        if not options.module:
            raise ConfigurationError("-m needs the name of a module")
        return ["-m", *options.module]
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise ConfigurationError("no script was given: cs-launch [options] script.py [arguments]; see cs-launch --help")
    script = command[0]
    if not Path(script).exists():
        raise ConfigurationError(f"there is no script {script!r} in {os.getcwd()}")
    return list(command)


def _log_files(options: argparse.Namespace, run_directory: RunDirectory) -> LogFiles | None:
    """Log files where the user wants them, or the last lines in a run directory that is kept, which may lie in
    memory."""
    if options.log_directory:
        return LogFiles.under(options.log_directory, run_directory.path)
    if options.keep_run_directory:
        return LogFiles(os.path.join(run_directory.path, "logs"), KEPT_NBYTES)
    return None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; see cs-launch --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "cs-launch",
        usage="cs-launch [options] script.py [arguments]\n       cs-launch [options] -m module [arguments]\n"
        "       cs-launch [options] --serve N | --join [tcp://ADDRESS:PORT] | --health | --doctor",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    _add_processes(parser)
    _add_places(parser)
    metrics_options.add_arguments(parser)
    listen_options.add_arguments(parser)
    ray_options.add_arguments(parser)
    plan_options.add_arguments(parser)
    parser.add_argument(
        "--serve",
        type=int,
        metavar="N",
        help="run a server for N workers that join it; it takes a script only with --listen",
    )
    parser.add_argument(
        "--return-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="with --serve --memory files: how long workers and script wait for this launcher to be restarted after "
        "it or its container was killed; with --serve --listen: how long a worker on another machine may be cut off "
        "(default: 60)",
    )
    join_options.add_arguments(parser)
    parser.add_argument("--health", action="store_true", help="run no script: ask whether the service is ready")
    parser.add_argument(
        "--doctor",
        action="store_true",
        help="run no script: check this machine, as cs-ctl doctor --quick does; exit code 1 if something is bad",
    )
    parser.add_argument(
        "--keep-run-directory",
        action="store_true",
        help="keep the run directory when the run ends, with the last lines of server and workers: at least 8 and at "
        "most 16 MiB of each",
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="run a module as a script, as python -m does"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_processes(parser: argparse.ArgumentParser) -> None:
    """The options for devices, and for processes that are late or die."""
    parser.add_argument(
        "--devices",
        metavar="LIST",
        default=os.environ.get("CS_DEVICES") or None,
        help="one device per worker, such as cpu:0,cpu:1 or gpu:0,gpu:1, or several, such as gpu:0+gpu:1,gpu:2+gpu:3; "
        "a number: as many GPUs, or CPUs where there is no GPU; gpu:all: every GPU; auto: every GPU, or one CPU for "
        "each core, at most 8 (default: CS_DEVICES, or what the script names, or every GPU, or cpu:0)",
    )
    parser.add_argument(
        "--parameter-device",
        metavar="DEVICE",
        default=os.environ.get("CS_PARAMETER_DEVICE") or None,
        help="the device that holds the variables (default: CS_PARAMETER_DEVICE, or what the script names, or the only "
        "device, or cpu:0 if there are several)",
    )
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="give up if the processes that start here are not ready after this time, or if no service answers --join; "
        "workers may join a service at any time (default: 60)",
    )
    parser.add_argument(
        "--stop-grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="after Ctrl-C or SIGTERM, wait so long for a script that saves a checkpoint; any other script is killed "
        "after 3 seconds (default: 30)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="restart processes that have died at most N times in all (default: 3; for workers on other machines 3 "
        "for each)",
    )
    parser.add_argument(
        "--step-timeout",
        type=float,
        metavar="SECONDS",
        help="restart a worker that others wait for and that has sent nothing for this long "
        "(default: never; warnings name long waits)",
    )
    parser.add_argument(
        "--server-recovery",
        choices=("on", "off"),
        default="on",
        help="replace a server that dies, without losing an update; this makes large dense updates slower "
        "(default: on)",
    )
    parser.add_argument(
        "--check-numerics",
        choices=CHECKS,
        help="look for numbers in gradients that are not finite; warn: log a warning; raise: raise NumericsError, and "
        "update nothing (default: CS_CHECK_NUMERICS, or what the script names, or off)",
    )


def _add_places(parser: argparse.ArgumentParser) -> None:
    """The options for files, memory and messages."""
    parser.add_argument(
        "--log-dir",
        dest="log_directory",
        metavar="DIR",
        default=os.environ.get("CS_LOG_DIR"),
        help="write all output of server and workers to DIR/cs-<run>/ (default: CS_LOG_DIR, or no files)",
    )
    parser.add_argument(
        "--error-file",
        metavar="FILE",
        default=os.environ.get(ENVIRONMENT),
        help="write the first failure to FILE as JSON: role, rank, pid, cause, last lines, exit code "
        "(default: CS_ERROR_FILE, or no file)",
    )
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        help="write what all processes do to FILE as a Chrome trace, when the script ends; https://ui.perfetto.dev "
        "shows it (default: CS_TIMELINE, or no file)",
    )
    parser.add_argument(
        "--run-dir", dest="run_directory", metavar="DIR", help="directory for the sockets (default: a new one)"
    )
    parser.add_argument(
        "--memory",
        choices=("memfd", "files", "frames"),
        default="memfd",
        help="the memory of the variables: memfd, anonymous shared memory; files, in the run directory, which must "
        "be on a tmpfs; frames, no shared memory: every byte travels in a message (default: memfd)",
    )
    parser.add_argument(
        "--mailboxes",
        choices=("on", "off"),
        default=mailboxes_by_default(),
        help="on: send the messages of a step through shared memory if possible; off: send them over ZeroMQ like all "
        "others (default: CS_MAILBOXES, or on)",
    )


if __name__ == "__main__":
    sys.exit(main())
