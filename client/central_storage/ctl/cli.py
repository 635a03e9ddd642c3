"""The command line of ``cs-ctl`` and ``cs-top``: reads it, and imports and runs the one subcommand that it names."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn, Protocol, cast

from cs_proto.errors import (
    CentralStorageError,
    ConfigurationError,
    InvalidArgumentError,
    LaunchError,
    NoAnswerError,
    ShutdownError,
)
from cs_proto.printable import printable
from cs_proto.version import __version__

from . import interrupts

__all__ = [
    "COMMANDS",
    "FOUND",
    "GOOD",
    "INVALID",
    "NO_ANSWER",
    "NO_SERVICE",
    "REFUSED",
    "SCRIPT_FAILED",
    "main",
    "parser_of",
    "top",
]

#: The exit codes.
GOOD, FOUND, INVALID, NO_SERVICE, NO_ANSWER, SCRIPT_FAILED, REFUSED = range(7)

#: Name -> module in ``commands``, in the order in which the help lists them.
COMMANDS = {
    "ls": "ls",
    "status": "status",
    "top": "top",
    "profile": "profile",
    "logs": "logs",
    "stack": "stack",
    "stop": "stop",
    "doctor": "doctor",
    "estimate": "estimate",
    "checkpoint": "checkpoint",
    "completion": "completion",
}

_DESCRIPTION = """\
Look at the services of your trainings, explain what they do, and end them. A service is found by itself, whether
cs-launch, a script or a notebook has started it. Nothing here changes a training, except stop. Before a training,
estimate says what it will take of the memory.
"""

_EPILOG = """\
A service is named by its name or the beginning of it, by the pid of any of its processes, or by its run directory
(strategy.address). Without a name, CS_ADDRESS counts, else the only service that runs.

On a terminal, cs-ctl prints tables (pip install 'central-storage[ctl]'); in a pipe plain lines; with --json JSON whose
fields the guide "cs-ctl" lists.

exit codes:
  0    good
  1    the command found what it was asked to find: a service that is not well, a machine with something bad, a plan
       that does not fit, a damaged checkpoint
  2    invalid options
  3    no such service, or no such checkpoint
  4    the service does not answer in time, or not as this version expects
  5    the script of estimate failed before its first step
  6    the operating system refuses something: the output cannot be written to a full disk
  130  Ctrl-C
"""


class Command(Protocol):
    """A module of ``commands``."""

    #: One line for ``cs-ctl --help``.
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the command; ``--json`` and ``--version`` are there."""

    def run(self, options: argparse.Namespace) -> int:
        """Do it. Returns the exit code."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``cs-ctl`` and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Only the module of the command that is called is imported, unless somebody asks for help.
    named = next((word for word in given if not word.startswith("-")), None)
    return _run("cs-ctl", given, {named} if named in COMMANDS else None)


def _check_order(arguments: Sequence[str]) -> None:
    """Raise ConfigurationError for an option of a command that stands before it."""
    place = next((place for place, word in enumerate(arguments) if word in COMMANDS), 0)
    for word in arguments[:place]:
        if word.startswith("-") and word not in ("-h", "--help", "--json", "--version"):
            raise ConfigurationError(
                f"{word} stands before the command {arguments[place]}; options of a command stand after it, as in "
                f"cs-ctl {arguments[place]} {word}"
            )


def top(arguments: Sequence[str] | None = None) -> int:
    """Run ``cs-top``, which is ``cs-ctl top``, and return its exit code."""
    return _run("cs-top", sys.argv[1:] if arguments is None else arguments)


def parser_of(program: str, names: set[str | None] | None = None) -> argparse.ArgumentParser:
    """The parser of ``cs-ctl`` or ``cs-top``; with ``names``, the others of its subcommands have no arguments."""
    if program == "cs-top":
        return _of_command(_Parser("cs-top", formatter_class=_FORMATTER), "top", has_json=False)
    parser = _Parser("cs-ctl", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=_FORMATTER)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--json", action="store_true", help="print JSON, as this option of a command does")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name in COMMANDS:
        if names is None:
            _of_command(commands.add_parser(name, help=_module(name).HELP, formatter_class=_FORMATTER), name)
        elif name in names:
            _of_command(commands.add_parser(name, formatter_class=_FORMATTER), name)
    return parser


_FORMATTER = argparse.RawDescriptionHelpFormatter


def _module(name: str) -> Command:
    return cast(Command, import_module(f"central_storage.ctl.commands.{COMMANDS[name]}"))


def _of_command(
    parser: argparse.ArgumentParser, name: str, has_json: bool | str = argparse.SUPPRESS
) -> argparse.ArgumentParser:
    """``has_json``: the default of --json. Without one, what stands before the command counts."""
    module = _module(name)
    parser.description = module.__doc__
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--json", action="store_true", default=has_json, help="print JSON")
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)
    return parser


def _run(program: str, arguments: Sequence[str], names: set[str | None] | None = None) -> int:
    _prepare_streams()
    try:
        with interrupts.ending():
            made = parser_of(program, names)
            if program == "cs-ctl":
                _check_order(arguments)
            options = made.parse_args(arguments)
            code = int(options.run(options))
            sys.stdout.flush()
    except (ConfigurationError, InvalidArgumentError) as error:
        return _failed(program, error, INVALID)
    except NoAnswerError as error:
        return _failed(program, error, NO_ANSWER)
    except (LaunchError, ShutdownError) as error:
        return _failed(program, error, NO_SERVICE)
    except CentralStorageError as error:  # such as an answer of another version
        return _failed(program, error, NO_ANSWER)
    except BrokenPipeError:  # the reader has seen enough
        _print_no_more()
        return GOOD
    except OSError as error:  # such as a full disk
        _print_no_more()
        return _failed(program, error, REFUSED)
    except KeyboardInterrupt:
        return interrupts.CTRL_C
    return code


def _prepare_streams() -> None:
    """Let everything be printed: into nothing where standard output is closed, and escaped where its encoding lacks a
    character. A closed standard input has nothing in it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (it is open as long as this process runs)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _print_no_more() -> None:
    """What is still to be printed, also when Python ends, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(program: str, error: Exception, code: int) -> int:
    print(printable(f"{program}: error: {error}", lines=True), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
