"""The recorded results of TensorFlow's own class, and which of them hold here.

``goldens.json`` is a list of small programs with what they gave under TensorFlow 2.21 (``expected``) and, where they
differ, under older versions (``by_version``). Most must give the same here. The rest is told here, by rule, with the
reason: what needs a part of TensorFlow that has no counterpart, what TensorFlow does by mistake, and where this
project has decided for another answer than the newest version's (:data:`DECISIONS`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Names of the programs that stand for parts of TensorFlow without a counterpart here.
NEEDS = {
    "tape": "needs a gradient tape",
    "fit": "needs Keras' Model.fit",
    "batch_norm": "needs a Keras layer",
}
QUIRK = "an oddity of TensorFlow that is on record and not copied"
SHARED_MEMORY = "relies on replicas sharing one heap; they are processes here"


@dataclass(frozen=True)
class Decision:
    """Why the answer is another than the newest TensorFlow's, and where it is found: an older version that gave it
    (for cases in which versions differ), or the answer itself."""

    reason: str
    version: str | None = None
    answer: Any = None


#: By id, or by the beginning of ids: decisions about cases in which TensorFlow's newest version is not followed.
DECISIONS = {
    "dataset/split_autoshard_off/": Decision("D2: the ceil rule, and no row is lost", version="2.3.4"),
    "dataset/input_options": Decision(
        "D3: options are accepted and do not change the split",
        answer={
            "t": "list",
            "items": [
                {"t": "list", "items": [{"t": "tensor", "dtype": "int64", "shape": [1], "data": [row]} for row in rows]}
                for rows in ([0, 1], [2, 3])
            ],
        },
    ),
    "optimizer/semantics/clipvalue_refused": Decision(
        "D10: the summed gradient is clipped",
        answer={"t": "tensor", "dtype": "float32", "shape": [2], "data": [-1.0, -1.0]},
    ),
}


@dataclass(frozen=True)
class Case:
    """One recorded program: ``answer`` is what it must give here, ``left_out`` why it is not run."""

    id: str
    kind: str
    n_replicas: int
    inputs: dict[str, Any]
    program: str
    answer: dict[str, Any]
    left_out: str | None

    @property
    def strategies(self) -> tuple[int, ...]:
        """The numbers of replicas of the strategies it uses: its own first, then those it makes by ``S(n)``."""
        return (self.n_replicas, *map(int, re.findall(r"\bS\((\d+)\)", self.program)))


def load() -> list[Case]:
    """All cases in the order of the file."""
    records = json.loads(Path(__file__).with_name("goldens.json").read_text())["cases"]
    return [_case(record) for record in records]


def load_rules() -> list[Case]:
    """The programs of ``rules.txt``, with the answer as text or the name of what is raised."""
    _, *blocks = Path(__file__).with_name("rules.txt").read_text().split("\n## ")
    return [_rule(block) for block in blocks]


def _rule(block: str) -> Case:
    parts = re.fullmatch(r"(\S+) \[(\d)\]\n(.*)\n=> ([^\n]*)\n*", block, re.DOTALL)
    assert parts is not None, block
    name, n, program, answer = parts.groups()
    kind, _, error = answer.partition("raises ")
    return Case(name, "program", int(n), {}, program, {"text": answer} if kind else {"raises": error}, None)


def _case(record: dict[str, Any]) -> Case:
    decision = next((decision for key, decision in DECISIONS.items() if record["id"].startswith(key)), None)
    return Case(
        record["id"],
        record["kind"],
        record["n_replicas"],
        record["inputs"],
        record.get("program", ""),
        _answer(record, decision),
        None if decision else _why_left_out(record),
    )


def _answer(record: dict[str, Any], decision: Decision | None) -> dict[str, Any]:
    if decision and decision.answer is not None:
        return {"value": decision.answer}
    version = decision.version if decision else record.get("prefer")  # the sounder answer, by the file's own word
    answer = dict(record.get("by_version", {}).get(version, record["expected"]))
    if record["inputs"].get("family") == "keras3":  # its slots have other names
        answer["value"] = {**answer["value"], "slots": {}}
    return answer


def _why_left_out(record: dict[str, Any]) -> str | None:
    if record.get("quirk"):
        return QUIRK
    if record.get("shared_memory"):
        return SHARED_MEMORY
    called = set(re.findall(r"\b(\w+)\(", record.get("program", "")))
    return next((reason for name, reason in NEEDS.items() if name in called), None)
