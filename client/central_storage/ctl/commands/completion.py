"""Print a script that completes commands and options of cs-ctl and cs-top in your shell.

bash:  cs-ctl completion bash >> ~/.bash_completion
zsh:   cs-ctl completion zsh > "${fpath[1]}/_cs-ctl"
fish:  cs-ctl completion fish > ~/.config/fish/completions/cs-ctl.fish
"""

from __future__ import annotations

import argparse

from central_storage.ctl.cli import parser_of
from central_storage.ctl.extras import require

__all__ = ["HELP", "add_arguments", "run"]

HELP = "print completions for bash, zsh or fish"

_SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """As :class:`central_storage.ctl.cli.Command`."""
    parser.add_argument("shell", choices=_SHELLS, help="your shell")
    parser.add_argument("--for", dest="program", choices=("cs-ctl", "cs-top"), default="cs-ctl", help="default: cs-ctl")


def run(options: argparse.Namespace) -> int:
    """As :class:`central_storage.ctl.cli.Command`."""
    parser = parser_of(options.program)
    if options.shell == "fish":
        print(fish(parser))
        return 0
    require("shtab", "ctl")
    import shtab

    print(shtab.complete(parser, options.shell))
    return 0


def fish(parser: argparse.ArgumentParser) -> str:
    """The completions of a parser and its subcommands for fish, which shtab does not know.

    Examples:
        >>> parser = argparse.ArgumentParser("tool", add_help=False)
        >>> _ = parser.add_argument("--json", action="store_true", help="print JSON")
        >>> print(fish(parser))
        complete -c tool -f
        complete -c tool -l json -d 'print JSON'
    """
    program = parser.prog
    lines = [f"complete -c {program} -f", *_options(program, parser, "")]
    for action in _actions(parser):
        if not isinstance(action, argparse._SubParsersAction):  # noqa: SLF001  (there is no public name)
            continue
        helps = {choice.dest: choice.help for choice in action._choices_actions}  # noqa: SLF001
        for name, command in action.choices.items():
            described = f" -d {_quoted(helps[name])}" if helps.get(name) else ""
            lines.append(f"complete -c {program} -n __fish_use_subcommand -a {name}{described}")
            lines += _options(program, command, f" -n '__fish_seen_subcommand_from {name}'")
    return "\n".join(lines)


def _options(program: str, parser: argparse.ArgumentParser, condition: str) -> list[str]:
    lines = []
    for action in _actions(parser):
        words = action.option_strings
        names = "".join(f" -{'l' if word.startswith('--') else 's'} {word.lstrip('-')}" for word in words)
        choices = "" if action.choices is None else f" -a {_quoted(' '.join(map(str, action.choices)))}"
        takes = " -r" if names and action.nargs != 0 else ""
        if names or (choices and not isinstance(action.choices, dict)):
            described = f" -d {_quoted(action.help)}" if action.help else ""
            lines.append(f"complete -c {program}{condition}{names}{takes}{choices}{described}")
        elif hasattr(action, "complete"):
            lines.append(f"complete -c {program}{condition} -F")
    return lines


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return parser._actions  # noqa: SLF001  (there is no public name)


def _quoted(text: str | None) -> str:
    return "'" + (text or "").replace("\\", "\\\\").replace("'", "\\'") + "'"
