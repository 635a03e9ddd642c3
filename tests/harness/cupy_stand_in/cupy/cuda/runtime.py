"""CUDA's runtime calls as far as they are used."""

from __future__ import annotations

import os
from typing import Any

from cupy import _machine
from cupy._machine import CUDARuntimeError

__all__ = ["CUDARuntimeError"]

memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = range(5)  # noqa: N816
hostRegisterReadOnly = _machine.READ_ONLY  # noqa: N816  (CuPy has no name for it)
cudaDevAttrCanUseHostPointerForRegisteredMem = 91  # noqa: N816
cudaIpcMemLazyEnablePeerAccess = 1  # noqa: N816


def getDeviceCount() -> int:  # noqa: N802
    if not _machine.gpus:
        raise CUDARuntimeError(_machine.NO_DEVICE)
    return len(_machine.gpus)


def getDevice() -> int:  # noqa: N802
    return _machine.here.device


def setDevice(device: int) -> None:  # noqa: N802
    _machine.set_device(device)


def getDeviceProperties(device: int) -> dict[str, Any]:  # noqa: N802
    found = _machine._find(device)
    uuid = bytes.fromhex(found.uuid.removeprefix("GPU-").replace("-", ""))
    uuid += os.urandom(3)  # CuPy reads a C string, into what stands behind
    return {"name": b"Stand-in", "uuid": uuid, "totalGlobalMem": found.nbytes, "major": 9, "minor": 0}


def deviceGetPCIBusId(device: int) -> str:  # noqa: N802
    return f"0000:{_machine._find(device).index + 1:02x}:00.0"


def deviceCanAccessPeer(device: int, peer: int) -> int:  # noqa: N802
    return int(_machine._find(device) is not _machine._find(peer))


def deviceGetAttribute(attrib: int, device: int) -> int:  # noqa: N802
    return int(bool(_machine._find(device)) and attrib == cudaDevAttrCanUseHostPointerForRegisteredMem)


def deviceSynchronize() -> None:  # noqa: N802
    for stream in list(_machine.gpu().streams):
        stream.run()


def memGetInfo() -> tuple[int, int]:  # noqa: N802
    device = _machine.gpu()
    return device.nbytes - device.allocated, device.nbytes


def malloc(size: int) -> int:
    return _machine.allocate(size, is_plain=True).start


def free(ptr: int) -> None:
    _machine.release(ptr)


def memcpy(dst: int, src: int, size: int, kind: int) -> None:
    _check_ends(dst, src, kind)
    _machine.copy(dst, src, size, None)


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
    from cupy.cuda import _streams

    _check_ends(dst, src, kind)
    _machine.copy(dst, src, size, _streams[stream] if stream else _machine.gpu().null)


def _check_ends(dst: int, src: int, kind: int) -> None:
    on_device = {memcpyHostToDevice: [dst], memcpyDeviceToHost: [src], memcpyDeviceToDevice: [dst, src]}
    if any(_machine.block_at(address, 1) is None for address in on_device.get(kind, [])):
        raise CUDARuntimeError(_machine.INVALID_VALUE)


def memset(ptr: int, value: int, size: int) -> None:
    stream = _machine.settle()
    stream.add(lambda: _machine.memory_at(ptr, size).fill(value))


def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:  # noqa: N802
    from cupy.cuda import _streams

    queue = _streams[stream] if stream else _machine.gpu().null
    queue.add(lambda: _machine.memory_at(ptr, size).fill(value))


def hostRegister(ptr: int, size: int, flags: int) -> None:  # noqa: N802
    _machine.page_lock(ptr, size, flags)


def hostUnregister(ptr: int) -> None:  # noqa: N802
    _machine.page_unlock(ptr)


def ipcGetMemHandle(devPtr: int) -> bytes:  # noqa: N802
    return _machine.export(devPtr)


def ipcOpenMemHandle(handle: bytes, flags: int = cudaIpcMemLazyEnablePeerAccess) -> int:  # noqa: N802
    return _machine.open_handle(handle)


def ipcCloseMemHandle(devPtr: int) -> None:  # noqa: N802
    _machine.release(devPtr)
