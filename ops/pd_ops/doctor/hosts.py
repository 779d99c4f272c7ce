"""Checks the hosts of a launcher file: each by itself, and whether they fit and reach one another."""

from __future__ import annotations

import json
import secrets
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pd_engine.errors import InvalidArgument, Unavailable
from pd_ops.cluster.host_facts import HostFacts, difference
from pd_ops.doctor.check import Check, Result
from pd_ops.doctor.on_host import HEAD
from pd_ops.launcher.cluster_file import ClusterFile, NodeType
from pd_ops.launcher.remote_shell import CHECKOUT, PYTHON, on_all
from pd_ops.output import Document
from pd_ops.tables import table

SETTINGS = f"{CHECKOUT}/ops/deploy/settings.yaml"  # as launcher files name it
CHECK_TIMEOUT_S, MARGIN_S = 300.0, 30.0
REACH_S = 20.0  # in which hosts must reach one another: they do not begin at one moment
PORTS = range(20_000, 32_000)  # below those that systems give away
GOOD_OFFSET_S = 0.5
BAD = (Result.WARNING, Result.FAILED)

Answer = Mapping[str, Any]
Fault = Exception


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    host: str
    kind: str
    checks: tuple[Check, ...]

    @property
    def can_serve(self) -> bool:
        return not any(check.result is Result.FAILED for check in self.checks)

    def to_json(self) -> Document:
        checks = [check.to_json() for check in self.checks]
        return {"host": self.host, "kind": self.kind, "can_serve": self.can_serve, "checks": checks}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What hosts have answered.

    Attributes:
        reached: by host, the seconds that a shell there took; or why there was none.
        examined: of hosts that were reached, what `on_host` printed.
        peers: of hosts with pd-relay, what `reach` printed: by other host.
    """

    reached: Mapping[str, float | Fault]
    examined: Mapping[str, Answer | Fault]
    peers: Mapping[str, Answer | Fault]


def examine(file: ClusterFile, *, with_rows: bool, tell: Callable[[str], None]) -> Found:
    """Raises:
    InvalidArgument: the file names no hosts.
    """
    if file.head_host is None:
        raise InvalidArgument(f"{file.path} names no hosts: type pd-relay doctor on each")
    tell(f"looking for {len(file.hosts)} hosts")
    reached = on_all(file.hosts, lambda host: _seconds(file, host))
    there = [host for host in file.hosts if isinstance(reached[host], float)]
    if there:
        tell("checking each of them" + (", bits of the ops included" if with_rows else ""))
    examined = on_all(there, lambda host: _examined(file, host, with_rows=with_rows))
    equipped = [host for host in there if isinstance(examined[host], Mapping)]
    if len(equipped) < 2:
        return Found(reached=reached, examined=examined, peers={})
    tell("having them reach one another")
    port = secrets.choice(PORTS)
    peers = on_all(equipped, lambda host: _peers(file, host, port, equipped))
    return Found(reached=reached, examined=examined, peers=peers)


def _seconds(file: ClusterFile, host: str) -> float:
    began_s = time.monotonic()
    file.shell.run(host, "true")
    return time.monotonic() - began_s


def _examined(file: ClusterFile, host: str, *, with_rows: bool) -> Answer:
    kind = _kind_of(file, host)
    pool = HEAD if kind.pool is None else kind.pool.value
    rows = " --rows" if with_rows else ""
    command = f"{PYTHON} -m pd_ops.doctor.on_host {SETTINGS} {pool} {max(1, kind.num_cpus)}{rows}"
    return _last_line(host, file.shell.run(host, command, timeout_s=CHECK_TIMEOUT_S))


def _peers(file: ClusterFile, host: str, port: int, hosts: Sequence[str]) -> Answer:
    others = [shlex.quote(other) for other in hosts if other != host]
    command = f"{PYTHON} -m pd_ops.doctor.reach {port} {REACH_S:g} {' '.join(others)}"
    return _last_line(host, file.shell.run(host, command, timeout_s=REACH_S + MARGIN_S))


def _last_line(host: str, said: str) -> Answer:
    try:
        answer = json.loads(said.splitlines()[-1])
    except (IndexError, ValueError):
        answer = None
    if not isinstance(answer, dict):
        raise Unavailable(f"{host} gave no answer that can be read: {said.strip()[-200:]!r}")
    return answer


# Pure from here


def reports(file: ClusterFile, found: Found) -> list[HostReport]:
    """A report of each host, in the file's order; the head's clock and version are those of all."""
    head = found.examined.get(str(file.head_host))
    return [
        HostReport(
            host=host, kind=_kind_of(file, host).name,
            checks=tuple(_checks(host, str(file.head_host), found, head if isinstance(head, Mapping) else None)),
        )
        for host in file.hosts
    ]


def lacking_kinds(file: ClusterFile, reported: Sequence[HostReport]) -> list[str]:
    """Kinds of hosts of which fewer than are needed can serve."""
    good = [one.host for one in reported if one.can_serve]
    return [
        kind.name for kind in file.node_types
        if sum(host in good for host in kind.hosts) < (1 if kind.pool is None else kind.min_workers)
    ]


def reports_text(reported: Sequence[HostReport], lacking: Sequence[str]) -> str:
    """What is not as it should be, a line each; and how many checks are."""
    rows = []
    for one in reported:
        rows += [
            (one.host, one.kind, check.name, check.result.value, check.sentence)
            for check in one.checks if check.result in BAD
        ]
        num_good = sum(check.result not in BAD for check in one.checks)
        if num_good:
            rows.append((one.host, one.kind, f"{num_good} others", "ok", ""))
    out = ", ".join(one.host for one in reported if not one.can_serve)
    verdict = f"enough hosts can serve{f'; those that cannot: {out}' if out else ''}"
    if lacking:
        verdict = f"too few hosts can serve: {', '.join(lacking)}"
    return f"{table(('host', 'kind', 'check', 'result', 'what was found'), rows)}\n{verdict}"


def _checks(host: str, head: str, found: Found, of_head: Answer | None) -> list[Check]:
    took = found.reached[host]
    if not isinstance(took, float):
        return [Check(name="shell", result=Result.FAILED, sentence=str(took))]
    checks = [Check(name="shell", result=Result.OK, sentence=f"a command took {took:.2f} s")]
    answer = found.examined[host]
    if not isinstance(answer, Mapping):
        sentence = f"pd-relay does not run there ({answer}); pd-relay up sets hosts up, by the file's setup_commands"
        return [*checks, Check(name="pd-relay", result=Result.FAILED, sentence=sentence)]
    checks += [_check(one) for one in answer["checks"]]
    if host != head and of_head is not None and of_head["facts"] is not None and answer["facts"] is not None:
        facts, wanted = HostFacts(**answer["facts"]), HostFacts(**of_head["facts"])
        wrong = difference(host, facts, wanted, str(answer["model"]))
        sentence = wrong or "version, ops and checkpoint are the head's"
        checks.append(Check(name="same", result=Result.FAILED if wrong else Result.OK, sentence=sentence))
    peers = found.peers.get(host)
    if peers is not None:
        checks += _of_peers(host, head, peers)
    return checks


def _of_peers(host: str, head: str, peers: Answer | Fault) -> list[Check]:
    if not isinstance(peers, Mapping):
        return [Check(name="network", result=Result.FAILED, sentence=str(peers))]
    out = [f"{other} ({answer['error']})" for other, answer in peers.items() if "error" in answer]
    if out:
        checks = [Check(name="network", result=Result.FAILED, sentence=f"does not reach {', '.join(out)}")]
    else:
        slowest_ms = 1e3 * max(answer["round_trip_s"] for answer in peers.values())
        sentence = f"reaches the {len(peers)} others, in {slowest_ms:.1f} ms there and back at most"
        checks = [Check(name="network", result=Result.OK, sentence=sentence)]
    if host != head and "offset_s" in peers.get(head, {}):
        behind_s = peers[head]["offset_s"]
        sentence = f"{abs(behind_s):.3f} s {'behind' if behind_s > 0 else 'ahead of'} the head's"
        is_good = abs(behind_s) <= GOOD_OFFSET_S
        advice = "" if is_good else ": logs and traces of hosts do not fit together; set clocks by NTP"
        checks.append(Check(
            name="wall clock", result=Result.OK if is_good else Result.WARNING, sentence=sentence + advice
        ))
    return checks


def _check(document: Mapping[str, str]) -> Check:
    return Check(name=document["name"], result=Result(document["result"]), sentence=document["sentence"])


def _kind_of(file: ClusterFile, host: str) -> NodeType:
    return next(kind for kind in file.node_types if host in kind.hosts)
