"""What is ended on a host, and what stays. In a process table of its own: it ends all that has the mark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pd_ops.launcher.end_host import MARK
from support.commands import environment
from support.lab_network import why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no process table of its own: {REASON}")

# Two processes of ours and one of somebody else's, then the end of the host; and which are there afterwards.
SCRIPT = """
mount -t proc proc /proc
{mark} sleep 600 & {mark} bash -c 'trap "" TERM; while :; do sleep 0.1; done' & sleep 601 &
until grep -l {mark} /proc/[0-9]*/environ 2>/dev/null | wc -l | grep -q '[2-9]'; do sleep 0.05; done
{python} -m pd_ops.launcher.end_host {flag}
ps -eo args
"""


@pytest.mark.parametrize("flag", ["", "--crash"])
def test_what_has_the_mark_is_ended_and_nothing_else(tmp_path: Path, flag: str) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "pd-relay.autoscaler.hosts").write_text("{}")
    (tmp_path / ".pd-relay-gcs").mkdir()
    script = SCRIPT.format(mark=MARK.decode(), python=sys.executable, flag=flag)
    done = subprocess.run(
        ["unshare", "--pid", "--mount", "--fork", "--kill-child", "bash", "-c", script], capture_output=True, text=True,
        check=False, env=environment(PD_RELAY_STATE_DIR=str(tmp_path), HOME=str(tmp_path)), timeout=120,
    )
    assert done.returncode == 0, done.stderr
    document, *left = done.stdout.splitlines()
    assert json.loads(document)["left"] == []
    assert len(json.loads(document)["ended"]) >= 2
    assert "sleep 601" in left
    assert "sleep 600" not in left
    assert not any("trap" in line for line in left if "unshare" not in line and "mount -t proc" not in line)
    kept = {"pd-relay.autoscaler.hosts", ".pd-relay-gcs"} if flag else set()
    assert kept == {name for name in os.listdir(tmp_path) if name in {"pd-relay.autoscaler.hosts", ".pd-relay-gcs"}}
