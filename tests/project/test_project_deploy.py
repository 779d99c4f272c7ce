"""The launcher files and manifests fit what reads them, and say the same.

Ray's schema is part of Ray, and is used here. KubeRay's is that of its custom resource RayCluster, version v1, in
release 1.7.0 (Apache-2.0), without the descriptions; what it does not name is refused here, as `kubectl` does.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from ray.autoscaler._private.util import prepare_config, validate_config

from pd_engine.errors import InvalidArgument
from pd_ops.cluster.plan import POOL_LABEL, Role
from pd_ops.launcher.cluster_file import read_cluster_file
from pd_ops.launcher.end_host import MARK
from pd_ops.launcher.host_provider import HostProvider
from support.checkout import ROOT

DEPLOY = ROOT / "ops" / "deploy"
LAUNCHER_FILES = (ROOT / "cluster.yaml", DEPLOY / "aws.yaml", DEPLOY / "gcp.yaml")
COMMANDS = (
    "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
    "head_start_ray_commands", "worker_start_ray_commands", "file_mounts", "rsync_exclude",
)
RAY_CLUSTER = Path(__file__).with_name("raycluster-1.7.0.json.gz")


def load(path: Any) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return document


def environment() -> dict[str, str]:
    lines = (DEPLOY / "host.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("path", LAUNCHER_FILES, ids=lambda path: path.name)
def test_ray_and_we_read_a_launcher_file(path: Any) -> None:
    validate_config(prepare_config(load(path)))
    kinds = {kind.pool: kind for kind in read_cluster_file(path).node_types}
    assert kinds.keys() == {None, *Role}
    assert kinds[None].num_cpus == 0
    assert all(kinds[role].num_cpus >= 1 <= kinds[role].min_workers for role in Role)


def test_the_schema_sees_a_typo() -> None:
    broken = load(LAUNCHER_FILES[0])
    broken["available_node_types"]["decode"]["min_worker"] = 1
    with pytest.raises(Exception, match="min_worker"):
        validate_config(prepare_config(broken))


@pytest.mark.parametrize("path", LAUNCHER_FILES[1:], ids=lambda path: path.name)
def test_clouds_run_the_same_commands(path: Any) -> None:
    own, cloud = load(LAUNCHER_FILES[0]), load(path)
    assert {name: own[name] for name in COMMANDS} == {name: cloud[name] for name in COMMANDS}


def test_the_provider_is_the_one_that_the_file_names() -> None:
    module, _, name = load(LAUNCHER_FILES[0])["provider"]["module"].rpartition(".")
    assert (module, name) == (HostProvider.__module__, HostProvider.__name__)


def test_every_process_has_the_mark() -> None:
    assert MARK.decode() in {f"{name}={value}" for name, value in environment().items()}
    starts = load(LAUNCHER_FILES[0])
    for command in [*starts["head_start_ray_commands"], *starts["worker_start_ray_commands"]]:
        assert "end_host --crash" in command or ". ops/deploy/host.env" in command


def test_a_file_without_a_pool_is_refused(tmp_path: Any) -> None:
    cloud = load(DEPLOY / "aws.yaml")
    del cloud["available_node_types"]["router"]
    path = tmp_path / "aws.yaml"
    path.write_text(yaml.safe_dump(cloud), encoding="utf-8")
    with pytest.raises(InvalidArgument, match="pool: router"):
        read_cluster_file(path)


def test_kuberay() -> None:
    cluster, claim, service = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text(encoding="utf-8"))
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    assert list(ray_cluster_faults(cluster)) == []
    spec = cluster["spec"]
    head, groups = spec["headGroupSpec"], spec["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert [group["labels"] for group in groups] == [{POOL_LABEL: role.value} for role in Role]
    for group in groups:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    pods = [head["template"]["spec"], *(group["template"]["spec"] for group in groups)]
    for [container] in (pod["containers"] for pod in pods):
        told = {one["name"]: one["value"] for one in container["env"]}
        assert environment().items() <= told.items()
        assert all(isinstance(value, str) for value in told.values())
    assert head["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert service["spec"]["selector"].items() <= groups[0]["template"]["metadata"]["labels"].items()
    assert spec["rayVersion"] in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def strict(schema: Any) -> Any:
    """Of Kubernetes' kind: fields that a mapping does not name are refused, but where it keeps unknown ones."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    whole = {name: strict(one) for name, one in schema.items()}
    keeps = schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not keeps:
        whole["additionalProperties"] = False
    return whole


def ray_cluster_faults(cluster: dict[str, Any]) -> list[str]:
    schema = strict(json.loads(gzip.decompress(RAY_CLUSTER.read_bytes())))
    schema["properties"]["metadata"] = {"type": "object"}  # every Kubernetes object has the same
    return [f"{error.json_path}: {error.message}" for error in Draft7Validator(schema).iter_errors(cluster)]


def test_kuberays_schema_sees_typos() -> None:
    cluster, *_ = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text(encoding="utf-8"))
    group = cluster["spec"]["workerGroupSpecs"][1]
    group["minReplica"] = 1
    group["template"]["spec"]["containers"][0]["envs"] = []
    group["replicas"] = "2"
    faults = ray_cluster_faults(cluster)
    assert len(faults) == 3
    assert all(word in " ".join(faults) for word in ("minReplica", "envs", "'2' is not of type"))
