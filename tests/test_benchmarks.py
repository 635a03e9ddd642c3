"""The benchmark still runs: every case once, with no word about how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.harness.processes import ROOT, run

import central_storage as cs


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import bench

    monkeypatch.setattr(bench, "REPEATS", 5)

    return bench


def test_every_case_gives_figures_and_all_are_kept(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with cs.CentralStorageStrategy(bench.DEVICES) as strategy:
        cases = [
            bench.digits_step(strategy),
            bench.empty_run(strategy),
            bench.adam_step(strategy, 1),
            bench.cold_start(),
        ]
        bench.measure(cases, rounds=1)
        processes = bench.memory(strategy)
    bench.show(cases, processes, rounds=1)
    bench.save(cases, processes, tmp_path / "results.json")
    results = json.loads((tmp_path / "results.json").read_text())
    assert [case["title"] for case in results["cases"]] == [case.title for case in cases]
    assert all(side["rounds"][0] > 0 for case in results["cases"] for side in case["sides"])
    assert len(results["memory"]) == 5
    shown = capsys.readouterr().out
    assert all(case.title in shown for case in cases)


def test_too_few_rounds_are_refused() -> None:
    ended = run("benchmarks/bench.py", "--rounds", "2")
    assert ended.code == 2
    assert "fewer than 5 rounds" in ended.err
