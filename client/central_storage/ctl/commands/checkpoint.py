"""Show what is in a checkpoint, and whether it is whole: each variable with its dtype, shape and bytes.

PATH is a file, or a directory of checkpoints, whose files are listed. Every byte is read and checked. Nothing is
changed, no service is needed, and nothing of the file is run.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from central_storage.ctl import printing
from central_storage.ctl.cli import FOUND, GOOD, NO_SERVICE
from central_storage.ctl.extras import complete_files
from cs_proto.errors import CheckpointError
from cs_proto.printable import counted, printable

if TYPE_CHECKING:
    from central_storage.checkpoint.listing import Contents

__all__ = ["HELP", "add_arguments", "run"]

HELP = "show what is in a checkpoint, and whether it is whole"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """As :class:`central_storage.ctl.cli.Command`."""
    parser.add_argument("action", choices=("show",), help="show: list the content")
    complete_files(parser.add_argument("path", metavar="PATH", help="a file, or a directory of checkpoints"))


def run(options: argparse.Namespace) -> int:
    """As :class:`central_storage.ctl.cli.Command`. 0: all are whole; 1: one is damaged; 3: there is none, or it cannot
    be read."""
    from central_storage.checkpoint.listing import contents, files_of  # it imports NumPy

    try:
        paths = files_of(options.path)
        found = [contents(path) for path in paths]
    except (CheckpointError, OSError) as error:
        print(f"cs-ctl: error: {printable(str(error))}", file=sys.stderr)
        return NO_SERVICE
    if options.json:
        printing.json_line({"path": options.path, "checkpoints": [_json(each) for each in found]})
    elif [options.path] == paths or len(found) == 1:
        for each in found:
            _print(each)
    else:
        _print_all(found)
    return FOUND if any(each.damage for each in found) else GOOD


def _json(found: Contents) -> dict[str, Any]:
    return {
        "path": found.path,
        "nbytes": found.nbytes,
        "format": found.format,
        "name": found.name,
        "save_counter": found.save_counter,
        "has_checksums": found.has_checksums,
        "is_whole": found.damage is None,
        "damage": found.damage,
        "variables": [
            {
                "name": array.name,
                "dtype": array.dtype,
                "shape": list(array.shape),
                "nbytes": array.nbytes,
                "also": list(array.also),
                "is_whole": array.damage is None,
            }
            for array in found.arrays
        ],
    }


def _print(found: Contents) -> None:
    printing.line(f"{found.path}: {_state(found)}, {printing.size(found.nbytes)}")
    if found.format is not None:
        name = "" if found.name is None else f", saved as {found.name}"
        counter = "" if found.save_counter is None else f", save counter {found.save_counter}"
        checks = "" if found.has_checksums else ", no checksums, so a changed byte is not noticed"
        printing.line(f"format {found.format}{name}{counter}{checks}; {counted(len(found.arrays), 'array')}")
        print()
        rows = [
            (
                array.name + "".join(f" = {way}" for way in array.also),
                array.dtype,
                printing.plain(list(array.shape)),
                printing.size(array.nbytes),
                "damaged" if array.damage else "whole" if found.has_checksums else "not checked",
            )
            for array in found.arrays
        ]
        printing.table(("NAME", "DTYPE", "SHAPE", "BYTES", "STATE"), rows, right=("BYTES",), below=("NAME",))
    if found.damage:
        print()
        printing.line(found.damage)


def _print_all(found: list[Contents]) -> None:
    rows = [
        (
            each.path,
            printing.plain(each.format),
            printing.plain(each.save_counter),
            str(len(each.arrays)) if each.format is not None else "-",
            printing.size(each.nbytes),
            _state(each),
        )
        for each in found
    ]
    columns = ("FILE", "FORMAT", "COUNTER", "ARRAYS", "BYTES", "STATE")
    printing.table(columns, rows, right=("FORMAT", "COUNTER", "ARRAYS", "BYTES"), below=("FILE",))
    for each in found:
        if each.damage:
            printing.line(each.damage)


def _state(found: Contents) -> str:
    return "damaged" if found.damage else "whole" if found.has_checksums else "not checked"
