"""Opens a GPU store with the server's options and segments."""

from __future__ import annotations

from cs_proto import segment_names
from cs_runtime.shared_memory.mapping import Mapping
from cs_server.compute.executor import Executor
from cs_server.config import ServerConfig
from cs_server.engine.store import address_budget
from cs_server.memory.segments import Segments

from .redo_journal import RedoJournal
from .store import GpuStore

__all__ = ["open_gpu_store"]

# Seconds that a server waits for the GPU memory of its killed predecessor, which the driver may not have freed yet.
_RELEASE_PATIENCE = 30.0


def open_gpu_store(config: ServerConfig, segments: Segments, arithmetic: Executor, journal_nbytes: int) -> GpuStore:
    """A store on the parameter device, which is a GPU. The journal first reserves ``journal_nbytes``.

    Raises DeviceError if the GPU cannot be used.
    """

    def memory(nbytes: int) -> Mapping:
        made = segments.make(segment_names.JOURNAL, journal_nbytes, "")
        return segments.make(segment_names.JOURNAL, max(2 * made.nbytes, address_budget.pages(nbytes)), "", nbytes)

    journal = RedoJournal(memory) if config.recovery else None
    patience = _RELEASE_PATIENCE if config.incarnation > 1 else 0.0
    gpu = GpuStore(config.parameter_device, config.replicas, segments, arithmetic, journal, patience)
    segments.on_extended = gpu.extended
    return gpu
