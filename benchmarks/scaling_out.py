"""The tables and the chart of docs/scaling-out.md, from the figures of ``cluster.py`` and the formulas of the model.

    python benchmarks/scaling_out.py [--results docs]

Reads cluster.json, which lies beside this program, and ``central_storage.cluster.cost``. Writes scaling-out.svg, and in
scaling-out.md what stands between each pair of markers, ``<!-- name -->`` and ``<!-- /name -->``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import cluster
import report
import scaling

from central_storage.cluster import cost

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "cluster.json"
WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
MB = 1e6
GBITS = (1, 10, 25, 100)
DENSE, ROWS = "adam-16MB", "embedding-1e5"  # the works that were measured with several numbers of workers
#: The systems beside this one, across the namespaces.
PEERS = ("tf-ps, 1 Gbit/s", "ray-ps, 1 Gbit/s", "ddp-gloo, 1 Gbit/s")

Seconds = dict[tuple[str, str], float]


def seconds_of(results: dict[str, Any]) -> Seconds:
    """The medians by (work, way)."""
    return {(row["work"], row["peer"]): row["seconds"] for row in results["rows"]}


def by_workers(seconds: Seconds, work: str) -> list[tuple[int, float]]:
    """What a step over 1 Gbit/s took with each number of workers, each at an outpost of its own."""
    return _by_workers(seconds, work, (cluster.SLOW_RELAY, *cluster.BY_WORKERS))


def by_workers_of_one(seconds: Seconds, work: str) -> list[tuple[int, float]]:
    """The same with all workers at one outpost."""
    return _by_workers(seconds, work, (cluster.SLOW_OUTPOST, *cluster.OUTPOST_BY_WORKERS))


def _by_workers(seconds: Seconds, work: str, ways: Iterable[cluster.Way]) -> list[tuple[int, float]]:
    found = sorted(ways, key=lambda way: way.replicas)
    return [(way.replicas, seconds[work, way.name]) for way in found if (work, way.name) in seconds]


def modelled(work: str, workers: int, gbit: float, copies: int | None = None) -> cost.Cost:
    """The formula of a work. ``copies`` of the variables are sent; None: each worker has one."""
    rate = cost.sealed_rate(gbit * 1e9)
    if work in cluster.DENSE:
        return cost.dense(workers, cluster.DENSE[work], rate, copies)
    return cost.rows(workers, cluster.ROWS_NBYTES, rate, copies)


def steps(seconds: Seconds) -> str:
    """A step of each work with two workers over 1 Gbit/s: the formula, this service, the others."""
    names = ["formula", "measured", "measured / formula", *(name.partition(",")[0] for name in PEERS)]
    lines = _head("step, two workers, 1 Gbit/s", *names)
    for work in (*cluster.DENSE, *cluster.ROWS):
        wanted, found = modelled(work, 2, 1).total, seconds.get((work, cluster.SLOW_RELAY.name))
        cells = [report.shown(wanted), _shown(found), f"{found / wanted:.2f}" if found else "-"]
        lines.append(_row(TITLES[work], *cells, *(_shown(seconds.get((work, peer))) for peer in PEERS)))
    return "\n".join(lines)


def shared(seconds: Seconds) -> str:
    """The steps of two workers over 1 Gbit/s: at an outpost each, and at one outpost that has one copy."""
    names = [f"{where}: {what}" for where in ("an outpost each", "one outpost") for what in ("formula", "measured")]
    lines = _head("step, two workers, 1 Gbit/s", *names, "measured / formula")
    for work in cluster.SLOW_OUTPOST.works:
        apart, together = modelled(work, 2, 1).total, modelled(work, 2, 1, 1).total
        found = seconds.get((work, cluster.SLOW_OUTPOST.name))
        cells = [report.shown(apart), _shown(seconds.get((work, cluster.SLOW_RELAY.name)))]
        cells += [report.shown(together), _shown(found), f"{found / together:.2f}" if found else "-"]
        lines.append(_row(TITLES[work], *cells))
    return "\n".join(lines)


def growth(seconds: Seconds) -> str:
    """The steps that were measured with several numbers of workers, beside the formula."""
    kinds = [
        (f"{TITLES[work]}{where}", work, copies, dict(points(seconds, work)))
        for work in (DENSE, ROWS)
        for where, copies, points in (("", None, by_workers), (", one outpost", 1, by_workers_of_one))
    ]
    lines = _head("workers", *(f"{title}: {what}" for title, *_ in kinds for what in ("formula", "measured")))
    for workers in sorted({count for *_, found in kinds for count in found}):
        cells = [
            cell
            for _, work, copies, found in kinds
            for cell in (report.shown(modelled(work, workers, 1, copies).total), _shown(found.get(workers)))
        ]
        lines.append(_row(f"{workers}", *cells))
    return "\n".join(lines)


def messages(seconds: Seconds) -> str:
    """Empty runs with several numbers of workers, beside the formula."""
    formulas = {
        "one machine": cost.control_here,
        "relay": cost.control,
        "one outpost": lambda workers: cost.control(workers, 1),
    }
    lines = _head("workers", *(f"{name}: {what}" for name in formulas for what in ("formula", "measured")))
    found = {name: dict(_by_workers(seconds, cluster.EMPTY, cluster.CONTROL[name])) for name in formulas}
    for workers in sorted({count for each in found.values() for count in each}):
        cells = [
            cell
            for name, formula in formulas.items()
            for cell in (report.shown(formula(workers)), _shown(found[name].get(workers)))
        ]
        lines.append(_row(f"{workers}", *cells))
    return "\n".join(lines)


def fast(seconds: Seconds) -> str:
    """What the network costs beside one machine, where the link has no limit."""
    ways = ("one machine", "relay", "one outpost", "ray-ps", "tf-ps", "ddp-gloo")
    lines = _head("step, two workers, no limit", *ways)
    for work in ("empty-run", *cluster.DENSE, *cluster.ROWS[:2]):
        lines.append(_row(TITLES[work], *(_shown(seconds.get((work, way))) for way in ways)))
    return "\n".join(lines)


def goals(results: dict[str, Any]) -> str:
    """Each goal beside what was reached."""
    lines = _head("goal", "wanted", "reached", "result")
    for goal in results["goals"]:
        sides = (goal["other"], goal["ours"]) if goal["sign"] == ">=" else (goal["ours"], goal["other"])
        word = {None: "not measured", True: "met", False: "missed"}[goal["is_met"]]
        reached = "-" if goal["reached"] is None else f"{goal['reached']:.2f}"
        sign = goal["sign"].replace(">=", "at least").replace("<=", "at most")
        title = TITLES.get(goal["work"], goal["work"])
        lines.append(_row(f"{title}: {' / '.join(sides)}", f"{sign} {goal['bound']:g}", reached, word))
    return "\n".join(lines)


def many(seconds: Seconds) -> str:
    """The formulas up to 1,000 workers, one on each node, at 10 Gbit/s."""
    sealed, plain, nbytes = cost.sealed_rate(10e9), cost.plain_rate(10e9), 1e6
    lines = _head("workers", "100 MB dense", "ring", "1 MB of rows each", "all-gather", "all-to-all", "control alone")
    for workers in (2, 4, 16, 64, 256, 1000):
        every = [
            cost.dense(workers, 100 * MB, sealed),
            cost.ring(workers, 1, 100 * MB, plain),
            cost.rows(workers, nbytes, sealed),
            cost.all_gather(workers, 1, nbytes, plain),
            cost.all_to_all(workers, 1, nbytes, plain),
        ]
        shown = [report.shown(each.total) for each in every]
        lines.append(_row(f"{workers:,}", *shown, report.shown(cost.control(workers))))
    return "\n".join(lines)


def crossover(seconds: Seconds) -> str:
    """How many times as long as a ring a dense step takes."""
    lines = _head("dense variables", *(f"{gbit} Gbit/s, {nodes} nodes" for gbit in GBITS for nodes in (2, 16)))
    for nbytes in (0.1 * MB, 1 * MB, 16 * MB, 100 * MB):
        found = [
            cost.dense(nodes, nbytes, cost.sealed_rate(gbit * 1e9)).total
            / cost.ring(nodes, 1, nbytes, cost.plain_rate(gbit * 1e9)).total
            for gbit in GBITS
            for nodes in (2, 16)
        ]
        lines.append(_row(f"{nbytes / MB:g} MB", *(f"{ratio:.1f}" for ratio in found)))
    return "\n".join(lines)


def tables(seconds: Seconds) -> str:
    """Up to how many workers 1 MB of rows each take less time than a ring over the gradient of the whole table."""
    lines = _head("a table of", *(f"{gbit} Gbit/s" for gbit in GBITS))
    for nbytes in (25.6 * MB, 256 * MB, 2560 * MB):
        found = [_most_workers(nbytes, gbit) for gbit in GBITS]
        lines.append(_row(f"{nbytes / MB:g} MB", *(f"{count:,} workers" for count in found)))
    return "\n".join(lines)


def _most_workers(nbytes: float, gbit: float) -> int:
    sealed, plain = cost.sealed_rate(gbit * 1e9), cost.plain_rate(gbit * 1e9)
    faster = (n for n in range(2, 10_000) if cost.rows(n, MB, sealed).total < cost.ring(n, 1, nbytes, plain).total)
    return max(faster, default=0)


def feeds(seconds: Seconds) -> str:
    """How many workers one service feeds with rows while they compute."""
    lines = _head("1 MB of rows each, a step that computes for", *(f"{gbit} Gbit/s" for gbit in GBITS))
    for within in (0.01, 0.05, 0.2):
        found = [cost.replicas_within(within, 1e6, cost.sealed_rate(gbit * 1e9)) for gbit in GBITS]
        lines.append(_row(f"{within * 1e3:.0f} ms", *(f"{count} workers" for count in found)))
    return "\n".join(lines)


TITLES = {
    "empty-run": "empty run",
    "adam-1MB": "Adam, 1 MB",
    "adam-16MB": "Adam, 16 MB",
    "adam-100MB": "Adam, 100 MB",
    "embedding-1e5": "1 MB of rows of 1e5",
    "embedding": "1 MB of rows of 1e6",
    "embedding-1e7": "1 MB of rows of 1e7",
    "killed-node/room": "a killed node, room on another one",
    "killed-node/joins": "a killed node, a new one joins",
    "rows": "1 MB of rows",
}
TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "steps": lambda results: steps(seconds_of(results)),
    "shared": lambda results: shared(seconds_of(results)),
    "growth": lambda results: growth(seconds_of(results)),
    "messages": lambda results: messages(seconds_of(results)),
    "fast": lambda results: fast(seconds_of(results)),
    "goals": goals,
    "many": lambda results: many(seconds_of(results)),
    "crossover": lambda results: crossover(seconds_of(results)),
    "tables": lambda results: tables(seconds_of(results)),
    "feeds": lambda results: feeds(seconds_of(results)),
}


def drawing(results: dict[str, Any]) -> str:
    """The formulas up to 1,000 workers, with the measured steps on them."""
    seconds, plain, nbytes = seconds_of(results), cost.plain_rate(1e9), cluster.ROWS_NBYTES
    dense = scaling.Axis(
        "16 MB dense, 1 Gbit/s",
        "workers, each on a node of its own unless said",
        WORKERS,
        {
            "formula of this service": [modelled(DENSE, n, 1).total for n in WORKERS],
            "formula of this service, all on one node": [modelled(DENSE, n, 1, 1).total for n in WORKERS],
            "formula of a ring": [cost.ring(n, 1, 16 * MB, plain).total for n in WORKERS],
        },
        _points(seconds, DENSE),
    )
    rows = scaling.Axis(
        "1 MB of rows each, 1 Gbit/s",
        "workers, each on a node of its own",
        WORKERS,
        {
            "formula of this service": [modelled(ROWS, n, 1).total for n in WORKERS],
            "all-gather": [cost.all_gather(n, 1, nbytes, plain).total for n in WORKERS],
            "all-to-all": [cost.all_to_all(n, 1, nbytes, plain).total for n in WORKERS],
            "ring over a whole table of 256 MB": [cost.ring(n, 1, 256 * MB, plain).total for n in WORKERS],
        },
        _points(seconds, ROWS),
    )
    faster = scaling.Axis(
        "1 MB of rows each, this service",
        "workers",
        WORKERS,
        {f"{gbit} Gbit/s": [cost.rows(n, MB, cost.sealed_rate(gbit * 1e9)).total for n in WORKERS] for gbit in (1, 10)}
        | {"messages alone": [cost.control(n) for n in WORKERS]},
        {"messages alone, measured": _by_workers(seconds, cluster.EMPTY, cluster.CONTROL["relay"])},
    )
    return scaling.drawing([dense, rows, faster])


def written(page: str, results: dict[str, Any]) -> str:
    """``page`` with all tables anew. Raises ValueError if one has no place."""
    for name, table in TABLES.items():
        first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, found, rest = page.partition(first)
        _, closed, after = rest.partition(last)
        if not (found and closed):
            raise ValueError(f"no place for the table {name}")
        page = f"{before}{first}\n{table(results)}\n{last}{after}"
    return page


def main() -> None:
    """Write the chart and the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE.parent / "docs", help="where page and chart are")
    directory = parser.parse_args().results
    results = json.loads(RESULTS.read_text())
    (directory / "scaling-out.svg").write_text(drawing(results))
    page = directory / "scaling-out.md"
    page.write_text(written(page.read_text(), results))
    print(f"written: {page} and its chart")


def _points(seconds: Seconds, work: str) -> dict[str, list[tuple[int, float]]]:
    found = {
        "this service, measured": by_workers(seconds, work),
        "this service, one outpost, measured": by_workers_of_one(seconds, work),
    }
    for peer in PEERS:
        if (work, peer) in seconds:
            found[f"{peer.partition(',')[0]}, measured"] = [(2, seconds[work, peer])]
    return {name: points for name, points in found.items() if points}


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else report.shown(seconds)


def _head(*cells: str) -> list[str]:
    return [_row(*cells), _row(*("---" for _ in cells))]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
