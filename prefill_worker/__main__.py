"""`python -m prefill_worker`: see `pd_engine.service.entry`."""

from __future__ import annotations

import sys

from pd_engine.service.entry import WorkerProcess, main
from pd_engine.service.importing import quick_imports
from pd_engine.settings import Settings


def build(settings: Settings, *, worker_id: str, host: str, secret: str, port: int) -> WorkerProcess:
    """The worker; torch is imported only when the arguments and settings were right."""
    with quick_imports():
        from prefill_worker.worker import PrefillWorker

    return PrefillWorker(settings, worker_id=worker_id, host=host, secret=secret, port=port)


if __name__ == "__main__":
    sys.exit(main("prefill", build))
