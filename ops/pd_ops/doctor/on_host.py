"""Checks the host that it runs on, for `pd-relay doctor --hosts` typed elsewhere.

    python -m pd_ops.doctor.on_host SETTINGS POOL NUM_WORKERS [--rows]     POOL: head, router, prefill or decode

Prints {"model", "facts", "checks"} as its last line; `facts` is null where there is no checkpoint.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pd_engine.errors import PdRelayError
from pd_engine.model.checkpoint import resolve_model
from pd_engine.settings import load_settings
from pd_ops.cluster.host_facts import host_facts
from pd_ops.cluster.plan import WORKER_ROLES, Role
from pd_ops.doctor.check import Check, Result
from pd_ops.doctor.suites import pool_checks, rows_checks

HEAD = "head"


def main() -> None:
    path, pool, num_workers, *flags = sys.argv[1:]
    role = None if pool == HEAD else Role(pool)
    print(json.dumps(examined(Path(path), role, int(num_workers), with_rows="--rows" in flags)))


def examined(path: Path, pool: Role | None, num_workers: int, *, with_rows: bool) -> dict[str, Any]:
    try:
        settings = load_settings(path)
        model = resolve_model(settings.model)
        checks = pool_checks(pool, settings, model, num_workers)
        if with_rows and pool in WORKER_ROLES:
            checks += rows_checks(settings, model, lambda sentence: None)
    except PdRelayError as error:
        failed = Check(name="settings", result=Result.FAILED, sentence=f"{path}: {error.message}")
        return {"model": None, "facts": None, "checks": [failed.to_json()]}
    return {
        "model": str(model), "facts": asdict(host_facts(str(model))), "checks": [check.to_json() for check in checks],
    }


if __name__ == "__main__":
    main()
