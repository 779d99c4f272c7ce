"""Small files of a checkpoint, read whole: never more than is allowed, never from a device or a pipe."""

from __future__ import annotations

import stat
from pathlib import Path

from pd_engine.errors import InvalidArgument


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Raises:
    OSError: it cannot be read.
    InvalidArgument: it is no regular file, or larger than `max_bytes`.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise InvalidArgument(f"{path} is no regular file")
    if status.st_size > max_bytes:
        raise InvalidArgument(f"{path} is larger than {max_bytes} bytes")
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise InvalidArgument(f"{path} is larger than {max_bytes} bytes")
    return data
