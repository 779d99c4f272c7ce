"""What a worker's process imports, as cheaply as that goes: torch is nearly all of its start."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIBRARY = "libtorch_cpu.so"
OTHER_DEVICES = ("libtorch_cuda.so", "libtorch_hip.so")

# Of what every worker imports: numpy, gRPC and pydantic come with them.
WITHOUT_TORCH = (
    "pd_engine.fingerprint", "pd_engine.service.client", "pd_engine.service.identity", "pd_engine.service.server",
)


@contextmanager
def quick_imports() -> Iterator[None]:
    """For imports of torch and all that stands on it.

    They make some 230,000 objects that all stay. Python's collector rests meanwhile, and looks at none of them later:
    it would go through all of them again and again here, and stop every stream for as long in a process that serves.
    Torch does not look through the installed packages for devices of others, which no op here runs on. Its library is
    loaded while what needs no torch is imported: where a second core is idle, that is a seventh of torch's import less.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    gc.disable()
    try:
        begin_loading_torch()
        for name in WITHOUT_TORCH:
            importlib.import_module(name)
        yield
    finally:
        gc.freeze()
        gc.enable()


def begin_loading_torch() -> threading.Thread | None:
    """Loads torch's library of CPU ops in a thread, without the interpreter's lock, as `import torch` does with it.

    None, and torch's import does it all, where torch is not installed or is of other devices too: it chooses their
    libraries itself, in an order of its own.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "lib"
    if not (folder / LIBRARY).exists() or any((folder / name).exists() for name in OTHER_DEVICES):
        return None
    thread = threading.Thread(target=_load, args=(folder / LIBRARY,), name="torch's library", daemon=True)
    thread.start()
    return thread


def _load(path: Path) -> None:
    """If it does not work out, `import torch` says why."""
    dlopen = ctypes.CDLL(None).dlopen  # ctypes.CDLL(path) would keep the interpreter's lock meanwhile
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int]
    dlopen(os.fsencode(path), os.RTLD_NOW)
