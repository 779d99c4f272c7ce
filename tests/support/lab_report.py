"""`make lab`: the lab of hosts, pools scaled under load, every drill in it, its end; and a report of it.

    python -m support.lab_report REPORT.md [DRILL ...]       all drills; or those that are named
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from support.checkout import ROOT
from support.commands import COMMAND, environment
from support.lab import HOSTS, Lab, booted_lab
from support.lab_network import why_not
from support.lab_targets import target_lines

SMALL_CACHE = {"cache_mib": 24}  # for `fill-cache`
LIMIT_S = 3_600.0
SCALES = (("prefill=2", "decode=3"), ("prefill=1", "decode=1"), ("decode=2",))


def main() -> int:
    report, names = Path(sys.argv[1]), sys.argv[2:] or ["all"]
    if (reason := why_not()) is not None:
        print(f"no lab of hosts here: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # hosts are ended then too
    settings = yaml.safe_load((ROOT / "ops" / "deploy" / "settings.yaml").read_text(encoding="utf-8"))
    settings |= {
        "prefill": {"workers": 1}, "engine": SMALL_CACHE, "cluster": {"drillable": True, "start_timeout_s": 600.0},
    }
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pd-relay-lab-") as directory, booted_lab(Path(directory), settings) as lab:
        text, passed = drill_all(lab, Path(directory), names)
    text += f"- all of it took {(time.monotonic() - began_s) / 60:.0f} minutes on {os.cpu_count()} cores\n"
    report.write_text(text, encoding="utf-8")
    print(f"{report}: {'passed' if passed else 'NOT passed'}", file=sys.stderr)
    return 0 if passed else 1


def drill_all(lab: Lab, directory: Path, names: Sequence[str]) -> tuple[str, bool]:
    """(the report, whether all of it is as it should be)."""
    num_hosts, began_s = sum(map(len, HOSTS.values())), time.monotonic()
    print(f"{num_hosts} hosts run; bringing the cluster up", file=sys.stderr)
    up = lab.command("up", lab.file, "--timeout", "900", "--json", timeout_s=LIMIT_S)
    if up.code != 0:
        raise SystemExit(up.stderr)
    up_s = time.monotonic() - began_s
    scaled = scale_under_load(lab, up.document["grpc_address"])
    drills = subprocess.run(
        [*COMMAND, "drill", *names, "--hosts", str(lab.file), "--yes", "--report", str(directory), "--recovery", "300",
         "--json"],
        stdout=subprocess.DEVNULL, check=False, timeout=LIMIT_S, env=environment(PD_RELAY_STATE_DIR=str(directory)),
    )
    began_s = time.monotonic()
    down = lab.command("down", lab.file, "--json", timeout_s=LIMIT_S)
    down_s = time.monotonic() - began_s
    num_left = sum(map(len, lab.network.processes().values()))
    if not (directory / "drills.json").exists():
        raise SystemExit("no drill was done")
    drilled = json.loads((directory / "drills.json").read_text(encoding="utf-8"))
    text = (directory / "drills.md").read_text(encoding="utf-8").replace("# Drills", "# The lab of hosts", 1)
    text = text.replace("\n## ", "\n".join(["", *target_lines(drilled["drills"]), "## "]), 1)
    text += "\n".join([
        "", "## Up, scaled, down", "",
        f"- {num_hosts} hosts on one machine, each with a network, mounts and processes of its own; `pd-relay up` "
        f"returned after {up_s:.0f} s",
        f"- under load, `pd-relay scale` with {'; '.join(map(' '.join, SCALES))}: {scaled['requests']} requests, "
        f"{scaled['failed']} failed; it took {', '.join(map(_seconds, scaled['seconds']))}",
        f"- `pd-relay down` took {down_s:.0f} s; processes left on hosts: {num_left}", "",
    ])
    return text, drills.returncode == down.code == num_left == 0 and is_scaled_well(scaled)


def scale_under_load(lab: Lab, address: str) -> dict[str, Any]:
    """Requests, one after the other, while both pools grow and shrink. With the `seconds` that each change took, None
    where it was refused."""
    client = subprocess.Popen(
        [sys.executable, "-m", "support.lab_client", address], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
        cwd=ROOT / "tests", env=environment(),
    )
    seconds: list[float | None] = []
    for sizes in SCALES:
        print(f"scale {' '.join(sizes)}", file=sys.stderr)
        began_s = time.monotonic()
        done = lab.on_head("scale", *sizes, "--json", timeout_s=LIMIT_S)
        seconds.append(time.monotonic() - began_s if done.code == 0 else None)
        if done.code != 0:
            print(f"scale {' '.join(sizes)}: {done.stderr}", file=sys.stderr)
    counts: dict[str, Any] = json.loads(client.communicate("", timeout=LIMIT_S)[0])
    return {**counts, "seconds": seconds}


def _seconds(seconds: float | None) -> str:
    return "it was refused" if seconds is None else f"{seconds:.0f} s"


def is_scaled_well(scaled: dict[str, Any]) -> bool:
    return bool(scaled["requests"]) and scaled["failed"] == 0 and None not in scaled["seconds"]


if __name__ == "__main__":
    sys.exit(main())
