"""`make lab`: the lab of hosts, every drill in it, pools scaled under load, its end; and a report of it.

    python -m support.lab_report REPORT.md
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from support.checkout import ROOT
from support.commands import COMMAND, environment
from support.lab import HOSTS, Lab, booted_lab
from support.lab_network import why_not

SMALL_CACHE = {"cache_mib": 24}  # for `fill-cache`
LIMIT_S = 3_600.0
SCALES = ("decode=3", "decode=1", "decode=2")


def main() -> int:
    report = Path(sys.argv[1])
    if (reason := why_not()) is not None:
        print(f"no lab of hosts here: {reason}", file=sys.stderr)
        return 2
    settings = yaml.safe_load((ROOT / "ops" / "deploy" / "settings.yaml").read_text(encoding="utf-8"))
    settings |= {
        "prefill": {"workers": 1}, "engine": SMALL_CACHE, "cluster": {"drillable": True, "start_timeout_s": 600.0},
    }
    with tempfile.TemporaryDirectory(prefix="pd-relay-lab-") as directory:
        with booted_lab(Path(directory), settings) as lab:
            text, passed = drill_all(lab, Path(directory))
        report.write_text(text, encoding="utf-8")
    print(f"{report}: {'passed' if passed else 'NOT passed'}", file=sys.stderr)
    return 0 if passed else 1


def drill_all(lab: Lab, directory: Path) -> tuple[str, bool]:
    """(the report, whether all of it is as it should be)."""
    began = time.monotonic()
    up = lab.command("up", lab.file, "--timeout", "900", "--json", timeout_s=LIMIT_S)
    if up.code != 0:
        raise SystemExit(up.stderr)
    up_s = time.monotonic() - began
    scaled = scale_under_load(lab, up.document["grpc_address"])
    drills = subprocess.run(
        [*COMMAND, "drill", "all", "--hosts", str(lab.file), "--yes", "--report", str(directory), "--recovery", "300"],
        stdout=subprocess.DEVNULL, check=False, timeout=LIMIT_S, env=environment(PD_RELAY_STATE_DIR=str(directory)),
    )
    began = time.monotonic()
    down = lab.command("down", lab.file, "--json", timeout_s=LIMIT_S)
    left = lab.network.processes()
    num_hosts = sum(map(len, HOSTS.values()))
    text = (directory / "drills.md").read_text(encoding="utf-8").replace("# Drills", "# The lab of hosts", 1)
    text += "\n".join([
        "## Up, scaled, down", "",
        f"- {num_hosts} hosts on one machine, each with a network, mounts and processes of its own; `pd-relay up` "
        f"returned after {up_s:.0f} s",
        f"- `pd-relay scale {', '.join(SCALES)}` under load: {scaled['requests']} requests, {scaled['failed']} failed",
        f"- `pd-relay down` took {time.monotonic() - began:.0f} s; processes left on hosts: "
        f"{sum(map(len, left.values()))}", "",
    ])
    return text, drills.returncode == 0 and down.code == 0 and not left and scaled["failed"] == 0


def scale_under_load(lab: Lab, address: str) -> dict[str, Any]:
    """Requests, one after the other, while a pool grows and shrinks."""
    client = subprocess.Popen(
        [sys.executable, "-m", "support.lab_client", address], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
        cwd=ROOT / "tests", env=environment(),
    )
    for sizes in SCALES:
        done = lab.on_head("scale", sizes, "--json", timeout_s=LIMIT_S)
        if done.code != 0:
            print(f"scale {sizes}: {done.stderr}", file=sys.stderr)
    counts: dict[str, Any] = json.loads(client.communicate("", timeout=LIMIT_S)[0])
    return counts


if __name__ == "__main__":
    sys.exit(main())
