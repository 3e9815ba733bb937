"""Every deployment file passes the checks of its target, and broken copies do not."""

from __future__ import annotations

import copy
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sage_ray.config_load import load_config
from tests.deploy.validators import cluster_faults, kuberay_faults, read
from tests.small import ROOT

FILES = {name: ROOT / path for name, path in {
    "aws": "cluster.yaml",
    "gcp": "deploy/gcp.yaml",
    "onprem": "deploy/onprem.yaml",
    "raycluster": "deploy/kuberay/raycluster.yaml",
    "rayjob": "deploy/kuberay/rayjob.yaml",
}.items()}  # fmt: skip
NEEDS = {"aws": "moto", "gcp": "googleapiclient"}
NONE = object()


def faults(name: str, content: dict[str, Any]) -> list[str]:
    return (kuberay_faults if name.startswith("ray") else cluster_faults)(content)


def needs(name: str) -> None:
    """The clouds' models are large: make test-cluster installs them."""
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed; make test-cluster installs requirements-cluster.txt")


@pytest.mark.parametrize("name", FILES)
def test_passes(name: str) -> None:
    needs(name)
    assert faults(name, read(FILES[name])) == []


@pytest.mark.parametrize(
    ("name", "place", "value", "words"),
    [
        ("aws", "max_worker", 3, "Additional properties are not allowed ('max_worker' was unexpected)"),
        ("aws", "provider.type", NONE, "KeyError: 'type'"),
        ("aws", "available_node_types.rollout.label", {"a": "b"}, "'label' was unexpected"),
        ("aws", "available_node_types.rollout.min_workers", 40, "max_workers"),
        ("aws", "head_node_type", "heads", "must be one of"),
        ("aws", "available_node_types.rollout.node_config.InstanceTyp", "p5.48xlarge", "InstanceTyp"),
        ("aws", "available_node_types.rollout.node_config.InstanceType", "p5.49xlarge", "InstanceType p5.49xlarge"),
        ("aws", "available_node_types.head.node_config.BlockDeviceMappings.0.Ebs.VolumeSize", "big", "VolumeSize"),
        ("aws", "available_node_types.rollout.node_config.InstanceMarketOptions.MarketType", "cheap", "cheap"),
        ("aws", "available_node_types.learner.labels.role", "lerner", "learner: labels.role must be one of"),
        ("aws", "head_start_ray_commands.1", "ray start --head --dashboard-host=0.0.0.0", "no token"),
        ("aws", "file_mounts", {}, "file_mounts: no token"),
        ("gcp", "available_node_types.head.node_config.machineTyp", "n2-standard-8", "head.machineTyp: unknown key"),
        ("gcp", "available_node_types.rollout.node_config.scheduling.provisioningModel", "CHEAP", "is none of"),
        ("gcp", "available_node_types.head.node_config.disks", {"boot": True}, "is of type object, must be array"),
        ("gcp", "available_node_types.head.node_config.disks.0.boot", "yes", "is of type string, must be boolean"),
        ("onprem", "provider.head_ip", NONE, "head_ip"),
        ("onprem", "worker_start_ray_commands", ["ray stop", "ray start"], "worker_start_ray_commands: no token"),
        ("raycluster", "spec.headGroupSpecs", {}, "'headGroupSpecs' was unexpected"),
        ("raycluster", "spec.workerGroupSpecs.0.replicas", "one", "'one' is not of type 'integer'"),
        ("raycluster", "spec.workerGroupSpecs.1.template.spec.containers.0.imag", "x", "'imag' was unexpected"),
        ("raycluster", "spec.workerGroupSpecs.1.labels.role", "rolout", "labels.role must be one of"),
        ("raycluster", "spec.headGroupSpec.serviceType", "LoadBalancer", "the dashboard must not be public"),
        ("raycluster", "spec.workerGroupSpecs.0.template.spec.containers.0.env", [], "ray-worker: no token"),
        ("rayjob", "spec.entrypont", "python", "'entrypont' was unexpected"),
        ("rayjob", "spec.backoffLimit", "never", "'never' is not of type 'integer'"),
    ],
)  # fmt: skip
def test_a_broken_copy_is_rejected(name: str, place: str, value: Any, words: str) -> None:
    needs(name)
    content = copy.deepcopy(read(FILES[name]))
    change(content, place, value)
    found = faults(name, content)
    assert found and any(words in fault for fault in found), found


def change(content: Any, place: str, value: Any) -> None:
    """Put a value at "a.b.0.c", or take what is there away."""
    *parents, last = (int(part) if part.isdigit() else part for part in place.split("."))
    for part in parents:
        content = content[part]
    if value is NONE:
        del content[last]
    else:
        content[last] = value


def test_the_run_of_the_job_is_a_valid_one() -> None:
    """The settings on the RayJob's command line, as /bin/sh gives them to launch.py."""
    entrypoint = read(FILES["rayjob"])["spec"]["entrypoint"]
    listed = entrypoint.replace("cd /home/ray/sage-ray && exec python", "printf '%s\\n'")
    words = subprocess.run(["sh", "-c", listed], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[:3] == ["launch.py", "train", "--config"]
    config = load_config([ROOT / words[3]], words[4:])
    assert config.cluster.node_roles == {"learner": "learner", "rollout": "rollout", "reward": "rollout"}
    assert config.cluster.grows and Path(config.output_dir).is_absolute()


BOOTSTRAP = """
import sys, yaml
from moto import mock_aws
from ray.autoscaler._private import commands
from ray.autoscaler._private.providers import _get_node_provider
with mock_aws(config={"iam": {"load_aws_managed_policies": True}}):
    config = commands._bootstrap_config(yaml.safe_load(open(sys.argv[1])), no_config_cache=True)
    provider = _get_node_provider(config["provider"], config["cluster_name"], use_cache=False)
    kind = config["available_node_types"]["rollout"]
    tags = {"ray-node-type": "worker", "ray-node-name": "one", "ray-user-node-type": "rollout"}
    provider.create_node(kind["node_config"], tags, 1)
    nodes = provider.non_terminated_nodes({"ray-user-node-type": "rollout"})
    rules = kind["node_config"]["SecurityGroupIds"]
    import boto3
    groups = boto3.client("ec2", region_name="us-east-1").describe_security_groups(GroupIds=rules)["SecurityGroups"]
    opened = {(rule["FromPort"], r["CidrIp"]) for g in groups for rule in g["IpPermissions"] for r in rule["IpRanges"]}
    provider.terminate_nodes(nodes)
    left = provider.non_terminated_nodes({"ray-user-node-type": "rollout"})
print(len(nodes), len(left), sorted(opened), kind["node_config"]["InstanceMarketOptions"])
"""


def test_ray_starts_nodes_by_the_aws_file(tmp_path: Path) -> None:
    """Ray's own bootstrap and node provider against an EC2 in memory: role, key, subnets, security group that opens SSH
    alone, spot nodes with tags, their end."""
    needs("aws")
    (tmp_path / ".ssh").mkdir()
    variables = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "none") | {"HOME": str(tmp_path)}
    variables |= {"AWS_DEFAULT_REGION": "us-east-1"}
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("token")
    command = [sys.executable, "-c", BOOTSTRAP, str(FILES["aws"])]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "1 0 [(22, '0.0.0.0/0')] {'MarketType': 'spot'}"


def linter() -> str:
    found = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if found is None:
        pytest.skip("hadolint is not installed; make test-cluster installs requirements-cluster.txt")
    return found


def test_the_image_file_is_clean(tmp_path: Path) -> None:
    """Linted, and a broken copy is not clean; it copies what there is, and all that launch.py imports."""
    text = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
    copied = [line.split()[-2] for line in text.splitlines() if line.startswith("COPY")]
    assert {"launch.py", "sage_ray", "actors", "configs", "assets", "requirements.txt"} == set(copied)
    assert all((ROOT / path).exists() for path in copied)
    assert subprocess.run([linter(), ROOT / "deploy" / "Dockerfile"], capture_output=True).returncode == 0
    broken = tmp_path / "Dockerfile"
    broken.write_text(text.replace("USER 1000", "USER root").replace("--no-install-recommends", ""), "utf-8")
    said = subprocess.run([linter(), broken], capture_output=True, text=True)
    assert said.returncode == 1 and "DL3015" in said.stdout


def test_the_prometheus_file_reads_the_nodes_that_ray_writes() -> None:
    content = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text("utf-8"))
    (job,) = content["scrape_configs"]
    assert job["file_sd_configs"] == [{"files": ["/tmp/ray/prom_metrics_service_discovery.json"]}]
