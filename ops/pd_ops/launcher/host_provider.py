"""Ray's node provider for hosts that somebody owns: those that the launcher file names, of several kinds.

Ray loads it by name (`provider.module`), in `ray up` and in the autoscaler on the head. Its own provider for named
hosts knows one kind of host only.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from typing import Any

from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

from pd_engine.errors import FailedPrecondition, Unavailable
from pd_ops.cluster.state_file import state_directory
from pd_ops.launcher.host_runner import HostRunner
from pd_ops.launcher.host_states import HostStateFile, host_of
from pd_ops.launcher.remote_shell import RemoteShell, on_all

STOP_TIMEOUT_S = 60.0
AUTH, ON_HEAD, HEAD_TYPE, HEAD_HOST = "_auth", "_on_head", "_head_type", "_head_host"  # what we add to `provider`

log = logging.getLogger(__name__)


class HostProvider(NodeProvider):
    """Node types have their hosts in `node_config.hosts`; a host is taken if it can be reached."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._shell = RemoteShell.of(provider_config, provider_config.get(AUTH) or {})
        self._file = host_state_file(cluster_name, on_head=ON_HEAD in provider_config)
        if ON_HEAD in provider_config:
            self._register_head(provider_config)

    def _register_head(self, provider_config: Mapping[str, Any]) -> None:
        host = provider_config[HEAD_HOST]
        with self._file.opened() as states:
            if host not in states.tags:
                states.take(host, {
                    TAG_RAY_NODE_KIND: NODE_KIND_HEAD, TAG_RAY_USER_NODE_TYPE: provider_config[HEAD_TYPE],
                    TAG_RAY_NODE_NAME: f"ray-{self.cluster_name}-head", TAG_RAY_NODE_STATUS: "up-to-date",
                }, is_head=True)

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        with self._file.opened() as states:
            return states.matching(tag_filters)

    def is_running(self, node_id: str) -> bool:
        with self._file.opened() as states:
            return node_id in states.tags

    def is_terminated(self, node_id: str) -> bool:
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> dict[str, str]:
        with self._file.opened() as states:
            return dict(states.tags.get(node_id, {}))

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        with self._file.opened() as states:
            if node_id in states.tags:
                states.tags[node_id].update(tags)

    def external_ip(self, node_id: str) -> str:
        return socket.gethostbyname(host_of(node_id))

    def internal_ip(self, node_id: str) -> str:
        return self.external_ip(node_id)

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        """Takes that many free hosts.

        Raises:
            Unavailable: fewer are free and can be reached; those are taken.
        """
        with self._file.opened() as states:
            free = states.free(node_config["hosts"])
        answers = on_all(free, lambda host: self._shell.run(host, "true"))
        reached = [host for host, answer in answers.items() if isinstance(answer, str)]
        with self._file.opened() as states:
            taken = [host for host in states.free(node_config["hosts"]) if host in reached][:count]
            for host in taken:
                states.take(host, tags, is_head=tags.get(TAG_RAY_NODE_KIND) == NODE_KIND_HEAD)
        if len(taken) < count:
            reasons = [str(answer) for answer in answers.values() if not isinstance(answer, str)]
            raise Unavailable(
                f"{tags.get(TAG_RAY_USER_NODE_TYPE)}: {count} hosts are wanted, {len(taken)} are free and reached; "
                f"{'; '.join(reasons) or 'no other is named'}"
            )

    def terminate_node(self, node_id: str) -> None:
        """Ends Ray on the host, if it is reached, and all that Ray runs there.

        An autoscaler that begins anew, with its head, wants to end lives that have long ended: hosts that are in
        another life by now, and the head that it runs on.
        """
        host = host_of(node_id)
        if not self.is_running(node_id) or host == self.provider_config.get(HEAD_HOST):
            return
        try:
            self._shell.run(host, self.provider_config["stop_command"], timeout_s=STOP_TIMEOUT_S)
        except (Unavailable, FailedPrecondition) as error:
            log.warning("%s: Ray was not ended there: %s", host, error)
        with self._file.opened() as states:
            states.let_go(node_id)

    def get_command_runner(
        self, log_prefix: str, node_id: str, auth_config: dict[str, Any], cluster_name: str, process_runner: Any,
        use_internal_ip: bool, docker_config: dict[str, Any] | None = None,
    ) -> HostRunner:
        return HostRunner(RemoteShell.of(self.provider_config, auth_config), host_of(node_id))

    def prepare_for_head_node(self, cluster_config: dict[str, Any]) -> dict[str, Any]:
        head_type = cluster_config["head_node_type"]
        [head_host] = cluster_config["available_node_types"][head_type]["node_config"]["hosts"]
        cluster_config["provider"] |= {
            ON_HEAD: True, HEAD_TYPE: head_type, HEAD_HOST: head_host, AUTH: cluster_config["auth"],
        }
        return cluster_config

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        cluster_config["provider"][AUTH] = cluster_config["auth"]
        return cluster_config


def host_state_file(cluster_name: str, *, on_head: bool) -> HostStateFile:
    """The launcher's, or the autoscaler's: of one cluster they may be on one host."""
    return HostStateFile(state_directory() / f"{cluster_name}.{'autoscaler' if on_head else 'launcher'}.hosts")
