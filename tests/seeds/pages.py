"""The code blocks of TensorFlow's pages about the strategy, cut out as they are printed.

The pages are not part of the project. They lie beside it, in ``../shared/seeds``, or in the folder that the environment
variable ``CS_SEED_PAGES`` names. The names in a block are changed by the table of docs/from-tensorflow.md, "Running
TensorFlow's examples", and by nothing else.
"""

from __future__ import annotations

import ast
import codeop
import doctest
import html
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.harness.processes import ROOT

FOLDER = Path(os.environ.get("CS_SEED_PAGES", ROOT.parent / "shared" / "seeds"))
PAGES = sorted(FOLDER.glob("*.txt")) if FOLDER.is_dir() else []
HEADING = "Running TensorFlow's examples"
_GUIDE = (ROOT / "docs/from-tensorflow.md").read_text().partition(f"\n## {HEADING}\n")[2]
_SECTION = _GUIDE.partition("\n## ")[0]


class Block(NamedTuple):
    """A code block: where its first line is, and its text."""

    page: str
    line: int
    text: str


class Step(NamedTuple):
    """A statement of a block, and the output that the page prints after it."""

    source: str
    wanted: str


def blocks() -> list[Block]:
    """Every code block of every page; what several pages print alike comes once."""
    found: dict[str, Block] = {}
    for path in PAGES:
        page = path.read_text()
        for line, text in _cut(page):
            if text.strip():
                found.setdefault(" ".join(text.split()), Block(path.stem[:3], line, text))
    return list(found.values())


def _cut(page: str) -> Iterator[tuple[int, str]]:
    fences = r"^```\w*\n(.*?)^```|^<pre[^>]*>\n<code>(.*?)</code></pre>"
    if "```" not in page and re.search(r"^    $", page, re.MULTILINE):  # a rendering that indents code
        fences = r"^    \n((?:^    .*\n)+)"
    elif "```" not in page:  # one that has lost both: lines from one that looks like code to one of prose
        fences = rf"((?:^(?:{_CODE}).*\n(?:\n+(?=(?:{_CODE})))?)+)"
    for match in re.finditer(fences, page, re.MULTILINE | re.DOTALL if "```" in page else re.MULTILINE):
        text = html.unescape(next(group for group in match.groups() if group is not None))
        lines = text.splitlines()
        margin = min((len(line) - len(line.lstrip()) for line in lines[:1]), default=0)
        stripped = "\n".join(line.removeprefix(" " * margin) if margin != 1 else line for line in lines)
        yield page[: match.start()].count("\n") + 1, stripped.strip("\n").removeprefix(" ") + "\n"


#: The beginning of a line that is code, in a page without fences.
_CODE = (
    r"[ ]{2,}(?!\d+\.)\S|#|@|['}]|\)|>>>|(?:def|with|for|if|elif|else|import|from|return)\b.*:|[\w.,\[\] ']+=(?!=)|"
    r"\w+(?:\.\w+)+\(|\(<tf"
)


def renaming() -> list[tuple[str, str]]:
    """The table of the page: (a pattern, what takes its place), in order."""
    rows = re.findall(r"^\| `([^`]+)`( at the beginning of a line)? \| `([^`]+)` \|$", _SECTION, re.MULTILINE)
    made = []
    for before, is_first, after in rows:
        pattern = r"\s*".join(map(re.escape, before.split()))
        guard = (
            r"^(?P<margin>\s*)" if is_first else r"(?<![\w.])(?P<margin>)" if before[0].isalpha() else "(?P<margin>)"
        )
        made.append((guard + pattern, after))
    return made


def section() -> str:
    """The section of docs/from-tensorflow.md about the examples."""
    return _SECTION


def helpers() -> str:
    """The code that the section of the page shows."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", _SECTION, re.MULTILINE | re.DOTALL))


def renamed(text: str) -> str:
    """``text`` under the table."""
    for pattern, after in renaming():
        text = re.sub(pattern, lambda match: match["margin"] + after, text, flags=re.MULTILINE)  # noqa: B023
    return text


def steps(text: str) -> list[Step]:
    """The statements of a block, with the outputs that it prints after them. Raises SyntaxError for what is neither."""
    if ">>>" in text:
        return [Step(each.source, each.want) for each in doctest.DocTestParser().get_examples(text)]
    found: list[Step] = []
    left = re.split(r"\n(?=[^\s)\]}])", text.rstrip("\n"))
    while left:
        chunk = left.pop(0)
        while left and _is_incomplete(chunk):
            chunk = f"{chunk}\n{left.pop(0)}"
        last = found[-1] if found else Step("", "")
        is_output = is_expression(last.source) and (not _is_python(chunk) or _is_literal(chunk))
        # Comments, and `elif` and `else`, belong to the statement before them.
        if found and not is_output and (chunk.startswith(("#", "elif", "else")) and _is_python(last.source + chunk)):
            found[-1] = Step(f"{last.source}{chunk}\n", last.wanted)
        elif is_output:
            found[-1] = Step(last.source, f"{last.wanted}{chunk}\n")
        else:
            compile(chunk, "page", "exec")
            found.append(Step(f"{chunk}\n", ""))
    return found


def _is_incomplete(source: str) -> bool:
    """Whether more lines may make a statement of it: an open bracket, a decorator."""
    if _is_python(source):
        return False
    try:
        return codeop.compile_command(source, symbol="exec") is None
    except SyntaxError:
        return False


def _is_python(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def is_expression(source: str) -> bool:
    """Whether ``source`` is one expression."""
    body = ast.parse(source).body
    return len(body) == 1 and isinstance(body[0], ast.Expr)


def _is_literal(source: str) -> bool:
    if source.startswith("array("):
        return True
    try:
        ast.literal_eval(source)
    except (ValueError, SyntaxError):
        return False
    return not source.startswith("#")


def raises() -> list[tuple[str, str]]:
    """(method, exception) of every *Raises* of the pages."""
    found = set()
    for path in PAGES:
        for part in re.split(r'^<h3 id="', path.read_text(), flags=re.MULTILINE)[1:]:
            table = re.search(r">Raises</th>.*?</table>", part, re.DOTALL)
            for kind in re.findall(r"<td>\n`(\w+)`\n</td>", table[0]) if table else ():
                found.add((part.partition('"')[0], kind))
    return sorted(found)
