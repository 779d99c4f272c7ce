"""What Ray's launcher and autoscaler do on a host: run commands, put files there. Through a `RemoteShell`, and tar."""

from __future__ import annotations

import base64
import io
import json
import shlex
import sys
import tarfile
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ray.autoscaler.command_runner import CommandRunnerInterface

from pd_engine.errors import InvalidArgument
from pd_ops.launcher.remote_shell import RemoteShell

COPY_TIMEOUT_S = 600.0
SETUP_TIMEOUT_S = 3600.0


class HostRunner(CommandRunnerInterface):
    """Ray's interface to one host."""

    def __init__(self, shell: RemoteShell, host: str) -> None:
        self._shell = shell
        self._host = host

    def run(
        self, cmd: str | None = None, timeout: int = 120, exit_on_fail: bool = False,
        port_forward: Any = None, with_output: bool = False,
        environment_variables: Mapping[str, object] | None = None, run_env: str = "auto",
        ssh_options_override_ssh_key: str = "", shutdown_after_run: bool = False, silent: bool = False,
    ) -> str:
        """Raises: as `RemoteShell.run`; InvalidArgument for what only ssh itself can do."""
        if cmd is None or port_forward or shutdown_after_run:
            raise InvalidArgument("the provider of named hosts runs commands only: no ports, no shutdown, no terminal")
        timeout_s = float(timeout) if cmd == "uptime" else SETUP_TIMEOUT_S  # Ray's 120 s are for a connection
        output = self._shell.run(self._host, f"{exports(environment_variables or {})}{cmd}", timeout_s=timeout_s)
        if not with_output and not silent:
            sys.stdout.write(output)
        return output if with_output else ""

    def run_rsync_up(self, source: str, target: str, options: Mapping[str, Any] | None = None) -> None:
        """A file, or what is in a directory; what is there already and not here stays."""
        path = Path(source).expanduser()
        if path.is_dir():
            excluded = (options or {}).get("rsync_exclude") or ()
            command, data = f"mkdir -p {home(target)} && tar -xzf - -C {home(target)}", packed(path, excluded)
        else:
            there, data = home(target), path.read_bytes()
            command = f'umask 077; mkdir -p "$(dirname {there})" && cat > {there}'
        self._shell.run(self._host, command, timeout_s=COPY_TIMEOUT_S, stdin=data)

    def run_rsync_down(self, source: str, target: str, options: Mapping[str, Any] | None = None) -> None:
        """One file."""
        text = self._shell.run(self._host, f"base64 {home(source)}", timeout_s=COPY_TIMEOUT_S)
        Path(target).expanduser().write_bytes(base64.b64decode(text))

    def remote_shell_command_str(self) -> str:
        return shlex.join(self._shell.argv(self._host, "bash -l"))

    def run_init(self, *, as_head: bool, file_mounts: Mapping[str, str], sync_run_yet: bool) -> bool | None:
        """Nothing: that is for containers."""
        return None


def exports(variables: Mapping[str, object]) -> str:
    """Shell code that sets them; what is no text goes as JSON, as Ray reads it."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in variables.items()}
    return "".join(f"export {name}={shlex.quote(text)}; " for name, text in texts.items())


def home(path: str) -> str:
    """A remote path for a shell: ~ in front is the home directory there, all else is taken as it is."""
    if path == "~" or path.startswith("~/"):
        return f"~/{shlex.quote(path[2:])}" if path[2:] else "~"
    return shlex.quote(path)


def packed(directory: Path, excluded: Sequence[str]) -> bytes:
    """A tar of what is below, without what matches a pattern of `excluded` anywhere in its path."""
    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = [part for part in Path(entry.name).parts if part != "."]
        return None if any(fnmatch(part, pattern) for part in parts for pattern in excluded) else entry

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        archive.add(directory, arcname=".", filter=wanted)
    return buffer.getvalue()
