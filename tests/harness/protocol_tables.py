"""The tables of docs/protocol.md, made from the code: ``python -m tests.harness.protocol_tables`` writes them again.

Each table stands between two markers, ``<!-- name -->`` and ``<!-- /name -->``; people write the text around them.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union

from cs_proto.codec import BULK_LIMITS, LIMITS, WORK_LIMITS
from cs_proto.errors import CODES, ReplicaError
from cs_proto.messages import Number, Point, ReadPoint
from cs_proto.records import RECORDS, Count, Finite, NotNegative, Record, Seconds

from .processes import ROOT

__all__ = ["DOCUMENT", "TABLES", "written"]

DOCUMENT = ROOT / "docs" / "protocol.md"

_SIMPLE = {bool: "bool", str: "str", bytes: "bin", type(None): "nil"}
# What section 2 of the document tells.
_NAMED = {
    Count: "count",
    Number: "number",
    Finite: "float",
    NotNegative: "float >= 0",
    Seconds: "seconds",
    Point | ReadPoint: "point",
}
_CODES_IN_ROW = 12
_GROUPS = [
    (1, 9, "Data inside messages"),
    (10, 29, "Sessions"),
    (30, 49, "Requests of controllers and observers"),
    (50, 59, "Merge points, inside Ask and Return"),
    (60, 69, "Messages of replicas"),
    (70, 89, "Answers of the server"),
    (90, 109, "Controller to worker"),
    (110, 139, "The supervisor's socket"),
    (140, 149, "Requests of the server"),
    (150, 159, "The link to a worker on another machine"),
]


def records() -> Iterator[str]:
    """Every record: code, name, fields in order, meaning; below each table, the rest of the records' docstrings."""
    for first, last, title in _GROUPS:
        yield f"**{title}**\n"
        yield "| code | record | fields | meaning |"
        yield "| --- | --- | --- | --- |"
        more: list[str] = []
        for code in sorted(RECORDS):
            kind = RECORDS[code]
            if first <= code <= last and kind.__module__.startswith("cs_proto."):
                yield f"| {code} | {kind.__name__} | {_fields(kind)} | {_paragraphs(kind)[0]} |"
                if rest := " ".join(_paragraphs(kind)[1:]):
                    more.append(f"- **{kind.__name__}.** {_lines(rest)}")
        yield "\n".join(["", *more, ""]) if more else ""


def errors() -> Iterator[str]:
    """Every exception code."""
    built_in = [f"`{code}`" for code, kind in CODES.items() if issubclass(kind, ReplicaError)]
    yield "| code | meaning |"
    yield "| --- | --- |"
    for code, kind in CODES.items():
        if not issubclass(kind, ReplicaError):
            yield f"| `{code}` | {_sentence(kind.__doc__ or '')} |"
    for first in range(0, len(built_in), _CODES_IN_ROW):
        codes = ", ".join(built_in[first : first + _CODES_IN_ROW])
        yield f"| {codes} | Python's exception of that name, raised in a replica |"


def limits() -> Iterator[str]:
    """What receivers accept."""
    meanings = {
        "header_nbytes": "bytes of the header",
        "frames": "frames of a message",
        "frame_nbytes": "bytes of one frame",
        "items": "items of one list; lists and maps in one header",
        "text_nbytes": "bytes of one text in UTF-8",
        "message_nbytes": "bytes of a message, all its parts together",
    }
    yield "| at most | server and supervisor accept | workers accept of clients and each other | of the server |"
    yield "| --- | --- | --- | --- |"
    for field in dataclasses.fields(LIMITS):
        values = [str(getattr(limits, field.name)) for limits in (LIMITS, WORK_LIMITS, BULK_LIMITS)]
        yield f"| {meanings[field.name]} | {' | '.join(values)} |"


def tags() -> Iterator[str]:
    """The tags in the body of a Value."""
    from central_storage.wire_values.body_codec import Tag

    yield "| tag | is | followed by |"
    yield "| --- | --- | --- |"
    for name, number, items in re.findall(r"^ +([A-Z_]+) = (\d+)  # (.*)$", inspect.getsource(Tag), re.MULTILINE):
        assert Tag[name] == int(number)
        yield f"| {number} | {name} | {items} |"


TABLES: Mapping[str, Callable[[], Iterator[str]]] = {
    "records": records,
    "errors": errors,
    "limits": limits,
    "tags": tags,
}


def written(text: str) -> str:
    """``text`` with every table as the code has it."""
    for name, table in TABLES.items():
        opening, closing = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, found, rest = text.partition(opening)
        _, ended, after = rest.partition(closing)
        if not found or not ended:
            raise ValueError(f"{DOCUMENT.name} has no place for the table of {name}: {opening.strip()} ... {closing}")
        body = "\n".join(table()).strip()
        text = f"{before}{opening}\n{body}\n\n{closing}{after}"
    return text


def _fields(kind: type[Record]) -> str:
    """The fields in order. Those of one type that follow one another share its name."""
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    alike = itertools.groupby(names, key=lambda name: _type(hints[name]))
    return "; ".join(f"{', '.join(group)}: {shared}" for shared, group in alike)


def _type(hint: Any) -> str:
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    if hint in _NAMED:
        return _NAMED[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return f"{_short(arguments[1].least)}..{_short(arguments[1].most)}"
    if origin is Literal:
        return " / ".join(f'"{argument}"' for argument in arguments)
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return f"[{_type(arguments[0])}, ...]"
    if origin is tuple:
        return f"[{', '.join(map(_type, arguments))}]"
    if origin in (Union, types.UnionType):
        return " / ".join(map(_type, arguments))
    name: str = hint.__name__
    return name


def _short(number: int) -> str:
    if number < -1 and (least := (-number).bit_length() - 1) > 20 and -number == 1 << least:
        return f"-2^{least}"
    bits = (number + 1).bit_length() - 1
    return f"2^{bits} - 1" if bits > 20 and number + 1 == 1 << bits else str(number)


def _paragraphs(kind: type[Record]) -> list[str]:
    """The paragraphs of the docstring up to its examples, each as Markdown in one line."""
    text = re.sub(r":[a-z]+:`([^`]+)`", r"\1", (kind.__doc__ or "").partition("Examples:")[0].strip())
    return [_sentence(part).replace("``", "`") for part in re.split(r"\n\s*\n", text)]


def _lines(paragraph: str) -> str:
    """One sentence a line, as an item of a list."""
    return re.sub(r"(?<=[.?]) (?=[A-Z`*])", "\n  ", paragraph)


def _sentence(doc: str) -> str:
    return " ".join(doc.split()).replace("|", r"\|")


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
