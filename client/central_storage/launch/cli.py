"""The command line of ``cs-launch``: reads it, checks it, hands it to ``foreground``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from central_storage import devices
from central_storage.diagnosis import configure_logging, dump_stacks_on_signal
from cs_proto.errors import ConfigurationError, DeviceError, LaunchError

from .cores import core_count
from .foreground import START_FAILED, run
from .output import LogFiles
from .packages import python_path
from .plan import Options, script_command, service_commands
from .run_directory import RunDirectory
from .supervise import TRANSPORT

__all__ = ["main"]

_USAGE_ERROR = 2
_CTRL_C = 130

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

Options of cs-launch come before the script; everything after it is the script's.

environment:
  CS_LOG=debug                   one line for every message
  CS_MESSAGES_DIR                keep these lines in files of that directory, one a process
  CS_LOG_DIR                     as --log-dir, also for a script that is started without cs-launch
  OMP_NUM_THREADS and its like   obeyed; otherwise the workers share the processors

exit codes:
  0          the script ended well          3          the service did not start
  1-125      the script's own               4, 5       the script failed after a worker, the server did
  2          wrong options                  130, 143   after Ctrl-C, SIGTERM
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """``cs-launch``: the exit code."""
    try:
        return _launch(_parser().parse_args(arguments))
    except (ConfigurationError, DeviceError) as error:
        print(f"cs-launch: error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except LaunchError as error:
        print(f"cs-launch: error: {error}", file=sys.stderr)
        return START_FAILED
    except KeyboardInterrupt:
        return _CTRL_C


def _launch(options: argparse.Namespace) -> int:
    arguments = _script_arguments(options)
    compute = devices.compute_devices(options.devices)
    parameters = devices.parameter_device(options.parameter_device, compute)
    if not 0 < options.start_timeout < 1e6:
        raise ConfigurationError(
            f"--start-timeout must be more than 0 seconds, less than 1e6, not {options.start_timeout:g}"
        )
    configure_logging("supervisor")
    dump_stacks_on_signal()
    run_directory = RunDirectory(options.run_directory, keep=options.keep_run_directory)
    try:
        plan = Options(tuple(compute), parameters, run_directory.path)
        commands = service_commands(
            plan, os.environ, python=sys.executable, cores=core_count(), python_path=python_path(os.environ)
        )
        workers = f"{len(compute)} worker{'s' if len(compute) > 1 else ''}"
        return run(
            run_directory,
            commands,
            script_command(plan, os.environ, arguments, python=sys.executable),
            banner=f"run {run_directory.name}: 1 script, {workers} ({', '.join(compute)}), parameters on {parameters}, "
            f"transport {TRANSPORT}, directory {run_directory.path}",
            start_timeout=options.start_timeout,
            logs=_log_files(options, run_directory),
            keeps_logs=bool(options.log_directory or options.keep_run_directory),
        )
    finally:
        run_directory.remove()


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
        usage="cs-launch [options] script.py [arguments]\n       cs-launch [options] -m module [arguments]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--devices",
        type=_device_list,
        metavar="LIST",
        help="one device per worker, like cpu:0,cpu:1 or gpu:0,gpu:1, or several, like gpu:0+gpu:1,gpu:2+gpu:3 "
        "(default: every GPU, else cpu:0)",
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
        "--log-dir",
        dest="log_directory",
        metavar="DIR",
        default=os.environ.get("CS_LOG_DIR"),
        help="keep all output of server and workers in DIR/cs-<run>/ (default: CS_LOG_DIR, else nowhere)",
    )
    parser.add_argument(
        "--run-dir", dest="run_directory", metavar="DIR", help="directory of the sockets (default: a fresh one)"
    )
    parser.add_argument(
        "--keep-run-directory", action="store_true", help="leave the run directory, with log files, when the run ends"
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m does")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _device_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    sys.exit(main())
