"""Print a script that completes commands, options and the names of services in your shell.

bash:  cs-ctl completion bash > ~/.local/share/bash-completion/completions/cs-ctl
zsh:   cs-ctl completion zsh > "${fpath[1]}/_cs-ctl"
fish:  cs-ctl completion fish > ~/.config/fish/completions/cs-ctl.fish

The directory must be there. bash needs the package bash-completion for this, or a line in ~/.bashrc:
eval "$(cs-ctl completion bash)"
"""

from __future__ import annotations

import argparse

from central_storage.ctl import printing, services
from central_storage.ctl.cli import parser_of
from central_storage.ctl.extras import require

__all__ = ["HELP", "add_arguments", "run"]

HELP = "print completions for bash, zsh or fish"

_SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """As :class:`central_storage.ctl.cli.Command`."""
    what = "your shell; services: print the names of services, for which these scripts ask"
    parser.add_argument("shell", choices=(*_SHELLS, "services"), help=what)
    parser.add_argument("--for", dest="program", choices=("cs-ctl", "cs-top"), default="cs-ctl", help="default: cs-ctl")


def run(options: argparse.Namespace) -> int:
    """As :class:`central_storage.ctl.cli.Command`."""
    if options.shell == "services":
        for entry in services.find():
            if not entry.is_stale:
                printing.line(entry.name)
        return 0
    require("shtab", "ctl")
    import shtab

    print(shtab.complete(parser_of(options.program), options.shell))
    return 0
