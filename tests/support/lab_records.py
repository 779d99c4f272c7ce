"""Which labs there are on this machine, so that one whose process was killed is removed by the next."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.lab_network import LabNetwork

RECORDS = Path("/run/pd-relay-labs")  # a file each, locked by its process as long as that lives


@contextmanager
def recorded(network: LabNetwork, records: Path = RECORDS) -> Iterator[None]:
    """For the time in which there is something of it; removed at the end."""
    records.mkdir(mode=0o700, exist_ok=True)
    path = records / network.bridge
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=records, prefix=".", delete=False) as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        record.write(network.to_json())
        record.flush()
        Path(record.name).rename(path)  # nobody sees it before it is locked and whole
        try:
            yield
        finally:
            network.remove()
            path.unlink()


def remove_abandoned(records: Path = RECORDS) -> list[str]:
    """The names of the bridges that they had."""
    removed = []
    for path in records.glob("[!.]*"):
        with suppress(FileNotFoundError, BlockingIOError), path.open(encoding="utf-8") as record:  # gone, or in use
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
            LabNetwork.of_json(record.read()).remove()
            removed.append(path.name)
            path.unlink()
    return removed
