"""One node with a dashboard that lives until its standard input closes. Prints the address once it is there."""

from __future__ import annotations

import socket
import sys

import ray
from ray.cluster_utils import Cluster


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


port, dashboard = map(int, sys.argv[1:])
cluster = Cluster(
    initialize_head=True,
    head_node_args={
        "gcs_server_port": port,
        "dashboard_port": dashboard,
        "include_dashboard": True,
        "dashboard_host": "127.0.0.1",
        "dashboard_agent_listen_port": free_port(),
        "num_cpus": 2,
        "num_gpus": 3,
        "labels": {"role": "all"},
        "object_store_memory": 300_000_000,
    },
)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
ray.shutdown()
cluster.shutdown()
