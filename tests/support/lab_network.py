"""A network of hosts on this machine: each with a network, mounts and processes of its own, on one bridge.

Needs root. The machine itself is on the bridge too, as the host that commands are typed on. A name that is not in use
and a subnet that nobody has make several labs at once possible.

    python -m support.lab_network STATE kill|boot|heal|slow|fast ADDRESS     what drills do to a host
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SUPPORT = Path(__file__).parent
SLOW_RATE, SLOW_BURST, SLOW_LATENCY = "2mbit", "16kbit", "200ms"
SLOW_LOSS = 0.01  # of packets, in each direction
BOOT_TIMEOUT_S = 30.0
END_TIMEOUT_S = 20.0
NEEDED = ("ip", "tc", "unshare", "mount")


def why_not() -> str | None:
    """Why there can be no lab here; None: there can."""
    if os.geteuid() != 0:
        return "it needs root, for network namespaces"
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        return f"it needs {', '.join(missing)}"
    probe = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c",
         "ip link add name br0 type bridge && mount --make-rprivate / && mount -t proc proc /proc"],
        capture_output=True, text=True, check=False,
    )
    return None if probe.returncode == 0 else f"namespaces are not allowed here: {probe.stderr.strip()[-200:]}"


@dataclass(frozen=True, kw_only=True)
class LabHost:
    name: str
    address: str
    namespace: str
    link: str


@dataclass(frozen=True, kw_only=True)
class LabNetwork:
    """Attributes:
    kept: paths that every host sees.
    environment: of every command on a host.
    """

    directory: Path
    bridge: str
    gateway: str
    hosts: tuple[LabHost, ...]
    kept: tuple[str, ...]
    environment: Mapping[str, str]

    @staticmethod
    def plan(
        directory: Path, names: Sequence[str], *, kept: Sequence[str], environment: Mapping[str, str]
    ) -> LabNetwork:
        """Nothing is made yet."""
        tag = f"pdl{secrets.token_hex(3)}"
        subnet = _free_subnet()
        addresses = [str(subnet[10 + number]) for number in range(len(names))]
        return LabNetwork(
            directory=directory, bridge=tag, gateway=str(subnet[1]), kept=tuple(kept), environment=dict(environment),
            hosts=tuple(
                LabHost(name=name, address=address, namespace=f"{tag}-{name}", link=f"{tag}h{number}")
                for number, (name, address) in enumerate(zip(names, addresses, strict=True))
            ),
        )

    def make(self) -> None:
        """The network; no host runs yet."""
        self._save()
        _run("ip", "link", "add", "name", self.bridge, "type", "bridge", "forward_delay", "0")
        _run("ip", "addr", "add", f"{self.gateway}/24", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "up")
        for host in self.hosts:
            _run("ip", "netns", "add", host.namespace)
            _run("ip", "link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _run("ip", "link", "set", host.link, "master", self.bridge, "up")
            for command in (("addr", "add", f"{host.address}/24", "dev", "eth0"), ("link", "set", "eth0", "up"),
                            ("link", "set", "lo", "up"), ("route", "add", "default", "via", self.gateway)):
                _run("ip", "-n", host.namespace, *command)

    @staticmethod
    def of_json(text: str) -> LabNetwork:
        fields = json.loads(text)
        return LabNetwork(**{
            **fields, "directory": Path(fields["directory"]), "kept": tuple(fields["kept"]),
            "hosts": tuple(LabHost(**host) for host in fields["hosts"]),
        })

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "directory": str(self.directory)})

    @property
    def path(self) -> Path:
        return self.directory / "network.json"

    def host(self, address: str) -> LabHost:
        return next(host for host in self.hosts if address in (host.address, host.name))

    def boot(self, host: LabHost) -> None:
        """Returns when its door is open."""
        self.heal(host)
        home, tmp = self.directory / host.name / "home", self.directory / host.name / "tmp"
        for path in (home, tmp):
            path.mkdir(parents=True, exist_ok=True)
        with (self.directory / host.name / "host.log").open("ab") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", host.namespace, "unshare", "--mount", "--pid", "--uts", "--ipc", "--fork",
                 "--kill-child", sys.executable, "-I", "-S", str(SUPPORT / "lab_host.py"), host.address, str(home),
                 str(tmp), *self.kept],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **self.environment},
            )
        self._pid_file(host).write_text(str(process.pid), encoding="ascii")
        deadline_s = time.monotonic() + BOOT_TIMEOUT_S
        while subprocess.run([*self.shell(host.address), "true"], capture_output=True, check=False).returncode != 0:
            assert process.poll() is None, (self.directory / host.name / "host.log").read_text()[-2000:]
            assert time.monotonic() < deadline_s, f"{host.name} did not boot"
            time.sleep(0.05)

    def kill(self, host: LabHost) -> None:
        """As by its plug: no packet says goodbye, and every process of it is gone when this returns."""
        self.cut(host)
        pid = int(self._pid_file(host).read_text(encoding="ascii"))
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        for child in map(int, children):
            os.kill(child, signal.SIGKILL)  # the first process of its namespace: the kernel ends the others
        while any(Path(f"/proc/{child}/ns/pid").exists() for child in children):
            time.sleep(0.005)
        self._pid_file(host).unlink()

    def cut(self, host: LabHost) -> None:
        _run("ip", "link", "set", host.link, "down")

    def heal(self, host: LabHost) -> None:
        _run("ip", "link", "set", host.link, "up")

    def slow(self, host: LabHost) -> None:
        """In both directions: a narrow link with a queue, that loses packets. (Small kernels have no netem for it.)"""
        limit = ("root", "tbf", "rate", SLOW_RATE, "burst", SLOW_BURST, "latency", SLOW_LATENCY)
        _run("tc", "qdisc", "replace", "dev", host.link, *limit)
        _run("ip", "netns", "exec", host.namespace, "tc", "qdisc", "replace", "dev", "eth0", *limit)
        _run("tc", "qdisc", "replace", "dev", host.link, "clsact")
        for direction in ("ingress", "egress"):
            _run("tc", "filter", "replace", "dev", host.link, direction, "pref", "1", "handle", "1", "bpf",
                 "direct-action", "bytecode", _lose(SLOW_LOSS))

    def num_dropped(self, host: LabHost) -> int:
        """Packets that its slow link has lost so far."""
        shown = subprocess.run(
            ["tc", "-s", "-j", "qdisc", "show", "dev", host.link], check=True, capture_output=True, text=True
        )
        return sum(int(one["drops"]) for one in json.loads(shown.stdout) if one["kind"] == "clsact")

    def fast(self, host: LabHost) -> None:
        _run("tc", "qdisc", "del", "dev", host.link, "clsact")
        _run("tc", "qdisc", "del", "dev", host.link, "root")
        _run("ip", "netns", "exec", host.namespace, "tc", "qdisc", "del", "dev", "eth0", "root")

    def processes(self) -> dict[str, list[str]]:
        """By host, command lines of what runs there beside the host itself."""
        found: dict[str, list[str]] = {}
        for host in self.hosts:
            spaces = os.stat(f"/run/netns/{host.namespace}").st_ino
            lines = [line for pid, line in _command_lines() if _net_of(pid) == spaces and "lab_host.py" not in line]
            if lines:
                found[host.name] = lines
        return found

    def remove(self) -> None:
        """Whatever is left of it, and whatever runs there."""
        for host in self.hosts:
            _end_all(host.namespace)
            subprocess.run(["ip", "netns", "del", host.namespace], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", host.link], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], check=False, capture_output=True)

    def shell(self, address: str = "{host}") -> list[str]:
        return [sys.executable, "-I", "-S", str(SUPPORT / "lab_shell.py"), address]

    def hands(self) -> dict[str, str]:
        """Commands that break hosts, and mend them."""
        command = f"{sys.executable} {SUPPORT / 'lab_network.py'} {self.path}"
        hands = {name: f"{command} {name} {{host}}" for name in ("kill", "boot", "heal", "slow", "fast")}
        # What a drill counts from is the beginning of its command: a Python takes a second on a busy machine.
        cut = f"ip link set $(cat {self.directory}/{{host}}.link) down"
        return hands | {
            name: shlex.join(["sh", "-c", script])
            for name, script in (("cut", cut), ("kill", f"{cut}; {hands['kill']}"))
        }

    def _save(self) -> None:
        self.path.write_text(self.to_json(), encoding="utf-8")
        for host in self.hosts:
            (self.directory / f"{host.address}.link").write_text(host.link, encoding="ascii")

    def _pid_file(self, host: LabHost) -> Path:
        return self.directory / host.name / "pid"


def _lose(share: float) -> str:
    """A classic BPF program for tc: a random word below `share` of its range drops the packet."""
    drop, keep = 2, 0  # TC_ACT_SHOT, TC_ACT_OK
    program = [(0x20, 0, 0, 0xFFFF_F038), (0x35, 1, 0, round(share * 2**32)), (0x06, 0, 0, drop), (0x06, 0, 0, keep)]
    return f"{len(program)}," + ",".join(" ".join(map(str, one)) for one in program)


def _end_all(namespace: str) -> None:
    """Processes of a network namespace; none if there is no such namespace."""
    deadline_s = time.monotonic() + END_TIMEOUT_S
    while time.monotonic() < deadline_s:
        shown = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
        if not (pids := [int(pid) for pid in shown.stdout.split()]):
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _free_subnet() -> ipaddress.IPv4Network:
    shown = json.loads(subprocess.run(["ip", "-j", "addr"], capture_output=True, text=True, check=True).stdout)
    taken = [ipaddress.ip_address(one["local"]) for link in shown for one in link["addr_info"]]
    subnets = [ipaddress.IPv4Network(f"10.213.{number}.0/24") for number in range(256)]
    return secrets.choice([subnet for subnet in subnets if not any(one in subnet for one in taken)])


def _command_lines() -> list[tuple[int, str]]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                line = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if line:
                found.append((int(name), line.strip()))
    return found


def _net_of(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return 0


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    network = LabNetwork.of_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    getattr(network, sys.argv[2])(network.host(sys.argv[3]))


if __name__ == "__main__":
    main()
