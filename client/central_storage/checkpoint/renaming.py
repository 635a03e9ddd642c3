"""Restoring objects whose names differ from those in the file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cs_proto.errors import CheckpointError

from .stored import Stored

__all__ = ["with_names"]


def with_names(path: str, stored: Stored, renamed: Mapping[str, str], prefixes: Iterable[str]) -> Stored:
    """``stored`` with the names that objects have here.

    ``renamed`` maps names here to names in the file. What lies below a name is renamed, too, and so are the slots and
    averages of its variables, which begin with one of ``prefixes``.

    Raises CheckpointError if the file holds nothing of such a name, or two arrays would get one name.
    """
    names: dict[str, str] = {}
    used: set[str] = set()
    for key in (*stored.keys, *stored.index["also"]):
        name = key
        for here, there in renamed.items():
            for prefix in prefixes:
                rest = key.removeprefix(f"{prefix}{there}")
                if key.startswith(f"{prefix}{there}") and rest[:1] in ("", "/"):
                    name = f"{prefix}{here}{rest}"
                    used.add(here)
        names[key] = name
    if lacking := [there for here, there in renamed.items() if here not in used]:
        raise CheckpointError(
            f"{path} holds nothing of the name {lacking[0]}; renamed maps names here to names in the checkpoint, which "
            f"`cs-ctl checkpoint show {path}` lists"
        )
    counts: dict[str, list[str]] = {}
    for key, name in names.items():
        counts.setdefault(name, []).append(key)
    if twice := [f"{' and '.join(sorted(keys))} to {name}" for name, keys in counts.items() if len(keys) > 1]:
        raise CheckpointError(f"{path}: renamed maps {twice[0]}; give each a name of its own")
    return stored.renamed(names)
