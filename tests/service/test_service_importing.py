"""Imports of a worker: the collector rests meanwhile, and looks at nothing of them later."""

from __future__ import annotations

import json
import subprocess
import sys

from support.checkout import ROOT

CODE = """
import gc, json
from pd_engine.service.importing import quick_imports
runs = []
gc.callbacks.append(lambda phase, info: runs.append(phase))
with quick_imports():
    during = gc.isenabled()
    import decode_worker.worker
print(json.dumps([during, gc.isenabled(), len(runs), gc.get_freeze_count(), len(gc.get_objects())]))
"""


def test_the_collector_rests_while_a_worker_is_imported_and_spares_it_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, cwd=ROOT)
    is_on_during, is_on_after, num_runs, num_frozen, num_tracked = json.loads(done.stdout)
    assert not is_on_during
    assert is_on_after
    assert num_runs == 0
    assert num_frozen > 100_000
    assert num_tracked < 1_000
