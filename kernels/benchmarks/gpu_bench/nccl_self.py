"""NCCL with one rank that sends to itself: the library, the device and a stream work together.

Through NCCL's C interface in the library that torch brings, since torch.distributed refuses to send to oneself.
"""

from __future__ import annotations

import ctypes
import statistics
from typing import Any

import torch

NUM_BYTES = 256 << 20
NCCL_UINT8 = 1
REPEATS = 10


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


def send_to_self(num_bytes: int = NUM_BYTES) -> dict[str, Any]:
    """Sends random bytes from one buffer to another and compares: {version, gb_per_s}.

    Raises:
        OSError: there is no libnccl.
        AssertionError: a call failed, or the bytes differ.
    """
    lib = ctypes.CDLL("libnccl.so.2")
    lib.ncclGetErrorString.restype = ctypes.c_char_p

    def check(code: int) -> None:
        assert code == 0, lib.ncclGetErrorString(code).decode()

    version = ctypes.c_int()
    check(lib.ncclGetVersion(ctypes.byref(version)))
    unique_id, communicator = _UniqueId(), ctypes.c_void_p()
    check(lib.ncclGetUniqueId(ctypes.byref(unique_id)))
    lib.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int]
    check(lib.ncclCommInitRank(ctypes.byref(communicator), 1, unique_id, 0))
    try:
        source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
        target = torch.zeros_like(source)
        stream = torch.cuda.current_stream()

        def exchange() -> None:
            handle = ctypes.c_void_p(stream.cuda_stream)
            size, peer = ctypes.c_size_t(num_bytes), ctypes.c_int(0)
            check(lib.ncclGroupStart())
            check(lib.ncclSend(ctypes.c_void_p(source.data_ptr()), size, NCCL_UINT8, peer, communicator, handle))
            check(lib.ncclRecv(ctypes.c_void_p(target.data_ptr()), size, NCCL_UINT8, peer, communicator, handle))
            check(lib.ncclGroupEnd())

        exchange()
        torch.cuda.synchronize()
        assert torch.equal(source, target), "the bytes that arrived differ"
        times_ms = []
        for _ in range(REPEATS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            exchange()
            end.record()
            end.synchronize()
            times_ms.append(start.elapsed_time(end))
        return {"version": version.value, "gb_per_s": round(num_bytes / statistics.median(times_ms) / 1e6, 1)}
    finally:
        lib.ncclCommDestroy(communicator)
