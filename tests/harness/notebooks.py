"""Notebooks: cells in a kernel of their own, as Jupyter runs them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import nbformat
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from .processes import is_alive
from .timing import unit

__all__ = ["Kernel", "notebook"]


class Kernel:
    """A kernel that runs one cell after the other."""

    def __init__(self, client: NotebookClient) -> None:
        self._client = client
        self._heard = asyncio.Event()

    @property
    def process(self) -> psutil.Process:
        """The kernel."""
        return psutil.Process(self._client.km.provisioner.pid)

    def children(self) -> list[psutil.Process]:
        """The processes that the kernel has started and that have not ended."""
        return [each for each in self.process.children(recursive=True) if is_alive(each)]

    async def run(self, code: str) -> str:
        """Run a cell; what it prints and shows, but for the plan of the memory, and the end of its traceback."""
        cell = nbformat.v4.new_code_cell(code)
        self._client.nb.cells.append(cell)
        with suppress(CellExecutionError):  # it is among the outputs
            await self._client.async_execute_cell(cell, len(self._client.nb.cells) - 1)
        return re.sub(r"\[central-storage\] planned memory: .*\n", "", "".join(_texts(cell)))

    async def data(self, code: str, kind: str) -> str:
        """Run a cell; what it shows of this MIME type."""
        await self.run(code)
        outputs = self._client.nb.cells[-1].outputs
        return "".join(str(output.get("data", {}).get(kind, "")) for output in outputs)

    async def html(self, code: str) -> str:
        """Run a cell; what it shows as HTML."""
        return await self.data(code, "text/html")

    async def run_until(self, code: str, printed: str) -> asyncio.Task[str]:
        """Begin to run a cell, and return when it has printed that."""
        self._heard.clear()
        self._awaited = printed
        task = asyncio.create_task(self.run(code))
        await asyncio.wait_for(self._heard.wait(), unit(30))
        return task

    async def interrupt(self) -> None:
        """Press the stop button."""
        await self._client.km.interrupt_kernel()

    _awaited = "\0"

    def hear(self, message: dict[str, Any]) -> None:
        """Called with every message of the kernel."""
        if self._awaited in message.get("content", {}).get("text", ""):
            self._heard.set()


@asynccontextmanager
async def notebook() -> AsyncIterator[Kernel]:
    """A new notebook and its kernel, for the length of the block."""
    client = _Client(nbformat.v4.new_notebook(), timeout=int(unit(30)), kernel_name="python3")
    kernel = client.kernel = Kernel(client)
    async with client.async_setup_kernel():
        yield kernel


class _Client(NotebookClient):  # type: ignore[misc]
    kernel: Kernel

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        self.kernel.hear(msg)
        return super().process_message(msg, cell, cell_index)


def _texts(cell: Any) -> Iterator[str]:
    for output in cell.outputs:
        if output.output_type == "error":
            yield re.sub(r"\x1b\[[\d;]*m", "", "\n".join(output.traceback))
        else:
            yield output.get("text") or output.get("data", {}).get("text/plain", "")
