"""`python -m decode_worker`: see `pd_engine.service.entry`."""

from __future__ import annotations

import sys

from decode_worker.worker import DecodeWorker
from pd_engine.service.entry import main

if __name__ == "__main__":
    sys.exit(main("decode", DecodeWorker))
