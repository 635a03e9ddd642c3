"""What mkdocs asks while it builds the site: pages made from the package, from the root of the repository and from
files that a page links to; the nav entries that end with an asterisk; links that lead out of ``docs/``."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / role) for role in ("client", "proto", "server", "worker"))]

from docs.site import reference  # noqa: E402  (the path is needed first)

#: Page of the site -> file of the repository. Everything under docs/ has the place that it has there.
OUTSIDE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing/index.md": "CONTRIBUTING.md",
    "contributing/tests.md": "tests/README.md",
    "contributing/documents.md": "docs/README.md",
    "contributing/benchmarks.md": "benchmarks/README.md",
    **{f"contributing/{role}.md": f"{role}/README.md" for role in ("proto", "server", "worker", "client")},
}
#: Folders that pages link to, and the pages that list what they hold.
FOLDERS = {"docs/decisions": "decisions/index.md", "docs": "contributing/documents.md"}
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
LANGUAGES = {".py": "python", ".yml": "yaml", ".toml": "toml", ".json": "json", ".sh": "bash", "": "text"}
_page_of: dict[str, str] = {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the nav entries that end with an asterisk."""
    named = set(re.findall(r"[\w/-]+\.md", repr(config.nav)))
    config.nav = _filled(config.nav, named)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and those of files outside ``docs/``, also of files that a page links to."""
    _page_of.clear()  # make docs-serve builds again in the same process
    for page, path in OUTSIDE.items():
        if (ROOT / path).exists():
            files.append(File.generated(config, page, content=(ROOT / path).read_text()))
            _page_of[path] = page
    for file in files.documentation_pages():
        _page_of.setdefault(f"docs/{file.src_uri}", file.src_uri)
    for page, text in {**_reference_pages(), "decisions/index.md": _decisions()}.items():
        files.append(File.generated(config, page, content=text))
    for path in sorted(_linked(files)):
        if path.endswith((".svg", ".png")):
            _page_of[path] = f"files/{path}"
            files.append(File.generated(config, _page_of[path], abs_src_path=str(ROOT / path)))
        else:
            _page_of[path] = f"files/{path}.md"
            language = LANGUAGES.get(Path(path).suffix, "text")
            text = f"# {path}\n\n````{language}\n{(ROOT / path).read_text()}````\n"
            files.append(File.generated(config, _page_of[path], content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files of the repository to their pages."""
    origin = OUTSIDE.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def led(match: re.Match[str]) -> str:
        target = _page_of.get(path) or FOLDERS.get(path) if (path := _path_of(origin, match[2])) else None
        if target is None:
            return match[0]  # mkdocs says where it leads nowhere
        return match[1] + posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".") + match[3]

    return LINK.sub(led, markdown)


def _path_of(origin: str, link: str) -> str | None:
    """The path from the root of what ``link`` in the file ``origin`` leads to; None for an address."""
    return None if ":" in link else posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def _linked(files: Files) -> set[str]:
    """The files of the repository that pages link to and that have no page."""
    found = set()
    for file in files.documentation_pages():
        origin = OUTSIDE.get(file.src_uri, f"docs/{file.src_uri}")
        for match in LINK.finditer(file.content_string):
            path = _path_of(origin, match[2])
            if path and path not in _page_of and not path.startswith(("docs/", "..")) and (ROOT / path).is_file():
                found.add(path)
    return found


def _filled(nav: Any, named: set[str]) -> Any:
    """``nav`` with every entry that ends with an asterisk replaced by the pages that it stands for."""
    entries: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, value),) = entry.items()
            value = _filled(value if isinstance(value, list) else [value], named) if "*" in repr(value) else value
            if value:
                entries.append({title: value})
        elif entry.endswith("*"):
            entries += _matching(entry[:-1], named)
        else:
            entries.append(entry)
    return entries


def _matching(folder: str, named: set[str]) -> list[Any]:
    if folder == "reference/":
        return _reference_nav()
    if folder == "contributing/":
        return [page for page, path in OUTSIDE.items() if page.startswith(folder) and (ROOT / path).exists()]
    order = [link for _, link, _ in LINK.findall((ROOT / "docs/README.md").read_text())]
    there = sorted(f"{folder}{path.name}" for path in (ROOT / "docs" / folder).glob("*.md"))
    there.sort(key=lambda page: order.index(page) if page in order else len(order))
    first = ["decisions/index.md"] if folder == "decisions/" else []
    return first + [page for page in there if page not in named and page != "README.md"]


def _decisions() -> str:
    decisions = sorted((ROOT / "docs/decisions").glob("*.md"))
    titles = {path.name: path.read_text().partition("\n")[0].removeprefix("# ") for path in decisions}
    lines = [f"- [{title}]({name})" for name, title in titles.items()]
    return (
        "# Decisions\n\nOne short record for each decision that would be costly to reverse.\n\n"
        + "\n".join(lines)
        + "\n"
    )


def _reference_pages() -> dict[str, str]:
    made = {"reference/index.md": _index()}
    for page, names in reference.pages().items():
        is_module = page not in (name for name, _ in names)
        blocks = [f"# {page}\n\n::: central_storage.{page}\n    options: {{members: [], show_root_heading: false}}\n"]
        for name, value in names:
            options = (
                ""
                if (shown := reference.members(name, value)) is None
                else f"members: {shown}, inherited_members: true"
            )
            blocks.append(
                f"::: central_storage.{name}\n    options: {{heading_level: {2 if is_module else 1}, {options}}}\n"
            )
        made[f"reference/{page}.md"] = "\n".join(blocks if is_module else blocks[1:])
    return made


def _groups() -> dict[str, list[str]]:
    """The pages of the reference by what they are about, the most used first."""
    groups: dict[str, list[str]] = {"Classes": [], "Functions": [], "Modules": []}
    for page, names in reference.pages().items():
        is_module = page not in (name for name, _ in names)
        groups["Modules" if is_module else "Classes" if isinstance(names[0][1], type) else "Functions"].append(page)
    return groups


def _reference_nav() -> list[Any]:
    groups = _groups().items()
    return ["reference/index.md", *({title: [{p: f"reference/{p}.md"} for p in pages]} for title, pages in groups)]


def _index() -> str:
    lines = ["# Reference", "", "Every public name of `import central_storage as cs`.", ""]
    for title, pages in _groups().items():
        lines += [f"## {title}", ""]
        for page in pages:
            names = [name for name, _ in reference.pages()[page] if name != page]
            listed = f": {', '.join(f'`{name}`' for name in names)}" if names else ""
            lines.append(f"- [`cs.{page}`]({page}.md){listed}")
        lines.append("")
    return "\n".join(lines)
