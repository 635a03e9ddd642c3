"""A headless Chromium, told what to do over its debugging pipe: messages of JSON, each ended by a zero byte."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.harness.timing import unit

#: Resolves to what ``look()`` gives, once that is not null: now, or after a change of the page.
_WHEN_THERE = """new Promise(resolve => {{
  const look = () => {{ const found = ({look})(); if (found !== null) {{ watch.disconnect(); resolve(found); }} }};
  const watch = new MutationObserver(look);
  watch.observe(document, {{subtree: true, childList: true, characterData: true}});
  look();
}})"""


class Browser:
    """One browser with one page. Use it in a ``with`` block, which starts and ends its processes."""

    def __init__(self, program: str, directory: Path) -> None:
        """``directory`` is for what the browser keeps."""
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-crash-reporter")
        self._command = (program, *options, "--remote-debugging-pipe", f"--user-data-dir={directory}", "about:blank")
        self._numbers = itertools.count(1)
        self._session = ""

    def __enter__(self) -> Self:
        theirs_in, self._out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # The browser reads its descriptor 3 and writes its descriptor 4.
        shell = ("bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out} {theirs_in}<&- {theirs_out}>&-', "bash")
        self._process = subprocess.Popen(
            [*shell, *self._command], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in = os.fdopen(ours_in, "rb")
        self._received = b""
        target = self._tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._tell("Page.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._session = ""
        try:
            self._tell("Browser.close")
            self._process.wait(unit(20))
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._out)
            self._in.close()

    def open(self, address: str) -> None:
        """Go to ``address`` and wait until all of the page is loaded."""
        answer = self._tell("Page.navigate", url=address)
        assert "errorText" not in answer, answer
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def when_there(self, look: str) -> Any:
        """What the JavaScript function ``look`` gives, once that is not null."""
        expression = _WHEN_THERE.format(look=look)
        answer = self._tell("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"]["value"]

    def _tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            read = os.read(self._in.fileno(), 1 << 16)
            assert read, "the browser has ended"
            self._received += read
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))
