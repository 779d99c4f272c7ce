"""What a worker's process imports, as cheaply as that goes: torch is nearly all of its start."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """For imports of torch and all that stands on it.

    They make some 230,000 objects that all stay. Python's collector rests meanwhile, and looks at none of them later:
    it would go through all of them again and again here, and stop every stream for as long in a process that serves.
    Torch does not look through the installed packages for devices of others, which no op here runs on.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
