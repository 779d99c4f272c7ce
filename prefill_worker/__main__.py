"""`python -m prefill_worker`: see `pd_engine.service.entry`."""

from __future__ import annotations

import sys

from pd_engine.service.entry import main
from prefill_worker.worker import PrefillWorker

if __name__ == "__main__":
    sys.exit(main("prefill", PrefillWorker))
