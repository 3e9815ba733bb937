"""`ray up` for real: on machines that are there, and on a cloud that makes them. make test-cluster runs it, as root.

The machines are its namespaces (hosts.sh), so that Ray, SSH, power cuts and cable cuts are real. Not covered: the
loss of the machine with the driver, which ends with its cluster (resume=auto goes on).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.cluster_hosts.laptop import NETWORK, SCRIPT, Laptop, address, small, until, write
from tests.deploy.validators import read
from tests.small import ROOT

MISSING = [name for name in ("ip", "unshare", "ssh", "/usr/sbin/sshd", "rsync") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.environ.get("SAGE_HOSTS") != "1", reason="make test-cluster runs it"),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces, needs root"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
RUN = """train cluster.device=cpu data.num_prompts=2 data.group_size=4 save_interval=100 sampling.num_steps=5
evaluation.num_prompts=0 rollout.num_workers=1""".split()


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Laptop]:
    found = Laptop(tmp_path / "home")
    found.hosts("net")
    yield found
    found.close()


def nodes(laptop: Laptop, url: str) -> list[str]:
    """Addresses of the living nodes, as the dashboard has them; none while it does not answer."""
    header = {"Authorization": f"Bearer {laptop.token}"}
    try:
        answer = requests.get(f"{url}/nodes?view=summary", headers=header, timeout=5).json()
    except (requests.exceptions.RequestException, ValueError):
        return []
    summary = (answer.get("data") or {}).get("summary", [])
    return sorted(one["ip"] for one in summary if one["raylet"].get("state") == "ALIVE")


def on_hosts(content: dict[str, Any], laptop: Laptop, name: str) -> dict[str, Any]:
    """A deployment file for the hosts: their addresses, key, smaller stores, quicker autoscaler, no installation."""
    content["cluster_name"] = f"{name}-{os.getpid()}"
    content["auth"] = {"ssh_user": "root", "ssh_private_key": str(laptop.hosts_folder / "key")}
    quick = "export AUTOSCALER_UPDATE_INTERVAL_S=1 AUTOSCALER_HEARTBEAT_TIMEOUT_S=8 "
    content["head_start_ray_commands"] = small(
        [one.replace("export ", quick, 1) for one in content["head_start_ray_commands"]]
    )
    content["worker_start_ray_commands"] = small(content["worker_start_ray_commands"])
    token = laptop.home / ".ray" / "auth_token"
    content["file_mounts"] = {"/root/.ray/auth_token": str(token)}
    here = ("chmod", "grep -q RAY_AUTH_MODE")
    content["setup_commands"] = [one for one in content["setup_commands"] if one.startswith(here)]
    return content


def test_machines_that_are_there(laptop: Laptop, tmp_path: Path) -> None:
    """deploy/onprem.yaml on three hosts: up, a run whose rollout and reward workers are on two of them, power cut,
    cable cut, the run's end, down."""
    for host in (1, 2, 3):
        laptop.hosts("add", host)
    content = on_hosts(read(ROOT / "deploy" / "onprem.yaml"), laptop, "onprem")
    content["provider"] |= {"head_ip": address(1), "worker_ips": [address(2), address(3)]}
    file = write(tmp_path / "onprem.yaml", content)
    laptop.ray("up", "-y", "--no-config-cache", str(file), RAY_UP_enable_autoscaler_v2="0")
    url = laptop.forward(file)
    until(lambda: nodes(laptop, url) == [address(i) for i in (1, 2, 3)], "three nodes")
    assert requests.get(f"{url}/api/version", timeout=10).status_code == 401
    with pytest.raises(requests.exceptions.ConnectionError):
        requests.get(f"http://{address(1)}:8265", timeout=5)  # the dashboard listens on the head's 127.0.0.1 only

    roles = "cluster.node_roles={learner: learner, rollout: rollout, reward: rollout}"
    words = [*RUN, roles, "rollout.num_workers=2", "reward.num_workers=2", "num_iterations=60", "faults.hung_min_s=20"]
    words += ["output_dir=/root/runs/one"]
    run = laptop.launch("submit", "--address", url, "--job", "one", *words)
    until(lambda: run.says("iteration 2/60: update"), "logs of the second iteration")
    laptop.hosts("power-off", 2)
    until(lambda: nodes(laptop, url) == [address(1), address(3)], "a dead node")
    laptop.hosts("boot", 2)
    until(lambda: nodes(laptop, url) == [address(i) for i in (1, 2, 3)], "the node that came back empty")
    assert not run.says("iteration 60/60"), "\n".join(run.lines[-20:])
    laptop.hosts("cut", 3)
    until(lambda: nodes(laptop, url) == [address(1), address(2)], "a node without its cable")
    laptop.hosts("heal", 3)
    assert run.ended(240) == 0, "\n".join(run.lines[-40:])
    assert run.says("job one ended with exit code 0") and laptop.token not in "\n".join(run.lines)
    metrics = [json.loads(line) for line in laptop.ssh(1, "cat /root/runs/one/metrics.jsonl").splitlines()]
    assert [line["step"] for line in metrics] == list(range(1, 61))
    faults = {name: metrics[-1][name] for name in metrics[-1] if name.startswith(("failures/", "reward_service/"))}
    assert faults["failures/rollout_deaths"] + faults["failures/rollout_hung"] >= 1, faults
    assert sum(line["reward/failed"] for line in metrics) == 0
    table = laptop.launch("status", "--address", url)
    assert table.ended(60) == 0 and table.says("SUCCEEDED")

    laptop.ray("down", "-y", str(file), RAY_UP_enable_autoscaler_v2="0")
    assert "gcs_server" not in laptop.ssh(1, "ps -e -o comm")


UNSET = (
    *("cluster_synced_files", "rsync_exclude", "rsync_filter", "head_setup_commands", "worker_setup_commands"),
    "initialization_commands",
)


def cloud_file(laptop: Laptop, endpoint: str) -> dict[str, Any]:
    """cluster.yaml with the hosts' cloud in the place of AWS: its node types, labels and limits as they are."""
    content = on_hosts(read(ROOT / "cluster.yaml"), laptop, "cloud")
    provider = {"type": "external", "module": "cloud.HostProvider", "endpoint": endpoint, "network": NETWORK}
    content |= {"provider": provider, "max_workers": 3, "idle_timeout_minutes": 0.4}
    content |= {key: [] for key in UNSET} | {"file_mounts_sync_continuously": False}  # Ray's defaults for real clouds
    content["available_node_types"]["rollout"]["max_workers"] = 2
    for name, kind in content["available_node_types"].items():
        kind["node_config"] = {"InstanceType": name}
        if name != "head":
            kind["resources"] = {"CPU": 2}
    content["file_mounts"]["/root/provider"] = str(SCRIPT.parent)
    heads = content["head_start_ray_commands"]  # the autoscaler there rents machines too
    content["head_start_ray_commands"] = [f"export PYTHONPATH=/root/provider; {one}" for one in heads]
    return content


def test_a_cloud_that_makes_them(laptop: Laptop, tmp_path: Path) -> None:
    """cluster.yaml with a cloud of hosts: the head and the learner's node come first, rollout nodes when a run asks for
    them, and go when they are idle; the run has waited for them. One more comes when the run is scaled up."""
    server = laptop.start(sys.executable, str(SCRIPT.with_name("cloud.py")), str(SCRIPT), f"{NETWORK}.1", "9777")
    until(lambda: server.process.poll() is None, "the cloud")
    file = write(tmp_path / "cloud.yaml", cloud_file(laptop, f"http://{NETWORK}.1:9777"))
    laptop.ray("up", "-y", "--no-config-cache", str(file))
    url = laptop.forward(file)
    until(lambda: len(nodes(laptop, url)) == 2, "head and learner")
    words = [*RUN, "cluster.grows=true", "cluster.node_roles={learner: learner, rollout: rollout, reward: rollout}"]
    run = laptop.launch("submit", "--address", url, *words, "num_iterations=60", "output_dir=/root/run")
    until(lambda: len(nodes(laptop, url)) == 3, "a rollout node for the run")
    until(lambda: run.says("iteration 2/60"), "the second iteration")
    scale = laptop.launch("submit", "--address", url, "scale", "2")
    start_s = until(lambda: run.says("rollout groups: 2 from now on"), "the run to take the request")
    node_s = until(lambda: len(nodes(laptop, url)) == 4, "a second rollout node")
    joined_s = until(lambda: run.says("has joined, 2 of 2 serve"), "the newcomer's admission")
    print(f"after {start_s:.1f} s demand; a node after {node_s:.1f} s more, admitted after {joined_s:.1f} s more")
    assert scale.ended(60) == 0, "\n".join(scale.lines)
    assert run.ended(300) == 0, "\n".join(run.lines[-40:])
    until(lambda: len(nodes(laptop, url)) == 2, "the idle rollout node is given back")
    laptop.ray("down", "-y", "--no-config-cache", str(file))
    until(lambda: not list(laptop.hosts_folder.glob("*/process")), "every machine is given back")
