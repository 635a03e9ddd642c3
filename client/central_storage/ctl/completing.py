"""What shells complete arguments by, in the words of shtab."""

from __future__ import annotations

import argparse

__all__ = ["add_service", "complete_files"]

_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "fish": "(__fish_complete_path (commandline -ct))"}
_NAMES = "cs-ctl completion services 2>/dev/null"
# zsh would ask once a session if the pattern itself asked.
_SERVICES = {
    "bash": "_cs_services",
    "zsh": "_cs_services",
    "fish": f"({_NAMES})",
    "preamble": {
        "bash": f'_cs_services() {{ compgen -W "$({_NAMES})" -- "$1"; }}',
        "zsh": f'_cs_services() {{ compadd -- ${{(f)"$({_NAMES})"}}; }}',
    },
}


def add_service(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a service, which shells complete by the names of those that run."""
    named = parser.add_argument("service", nargs="?", metavar="NAME", help="a name, a pid or a run directory")
    named.complete = _SERVICES  # type: ignore[attr-defined]


def complete_files(argument: argparse.Action) -> None:
    """Let shells complete an argument by names of files."""
    argument.complete = _FILES  # type: ignore[attr-defined]
