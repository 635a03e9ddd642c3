"""docs/architecture.md names what is in the tree: every package has a line, every path and class exists."""

from __future__ import annotations

import builtins
import re
import tomllib

from tests.harness.processes import ROOT

SOURCE_ROOTS = ("proto", "server", "worker", "client")
TEXT = (ROOT / "docs/architecture.md").read_text()
MODULES = [path for root in SOURCE_ROOTS for path in sorted((ROOT / root).rglob("*.py"))]
FILES = [path.relative_to(ROOT / path.relative_to(ROOT).parts[0]) for path in MODULES]


def named(pattern: str) -> set[str]:
    """What stands between backticks in the text and matches ``pattern`` from end to end."""
    return {name for name in re.findall(r"`([^`\n]+)`", TEXT) if re.fullmatch(pattern, name)}


def test_every_path_is_a_module() -> None:
    known = {"/".join(path.parts[at:]) for path in FILES for at in range(len(path.parts))}
    outside = {name for name in named(r"[\w/-]+\.py") if (ROOT / name).is_file()}
    assert named(r"[\w/]+\.py") - known - outside == set()


def test_every_package_has_a_line() -> None:
    packages = {str(path.parent) for path in FILES if path.name == "__init__.py"}
    mentioned = {name.rstrip("/") for name in named(r"[\w/]+")}
    assert packages - mentioned == set()
    assert named(r"(?:cs_\w+|central_storage)/[\w/]*/") - {f"{name}/" for name in packages} == set()


def test_every_class_and_method_is_defined() -> None:
    source = "\n".join(module.read_text() for module in MODULES)
    defined = set(re.findall(r"^\s*(?:class|def|async def) (\w+)", source, re.MULTILINE))
    fields = set(re.findall(r"^    (\w+): ", source, re.MULTILINE))
    used = {part for name in named(r"[A-Z]\w*[a-z]\w*(?:\.\w+)?") for part in name.split(".")}
    assert used - defined - fields - set(dir(builtins)) == set()


def test_a_name_is_defined_in_the_module_that_is_given_for_it() -> None:
    pairs = re.findall(r"`(\w+)` (?:in|of) `([\w/]+\.py)`", TEXT)
    assert len(pairs) > 5
    for name, path in pairs:
        [module] = [module for module in MODULES if str(module).endswith(f"/{path}")]
        assert re.search(rf"^ *(?:class |def )?{name}\b", module.read_text(), re.MULTILINE), (name, path)


def test_every_contract_is_one() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = {contract["id"] for contract in settings["tool"]["importlinter"]["contracts"]}
    chapter = TEXT.partition("\n## The contracts\n")[2].partition("\n## ")[0]
    rows = [line for line in chapter.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(contracts)


def test_links_to_chapters_lead_to_a_heading() -> None:
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in TEXT.splitlines()}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= headings


def test_there_is_something_to_look_at() -> None:
    assert len(named(r"[\w/]+\.py")) > 60
