"""A cloud of such hosts, and Ray's way to rent there: `ray up` takes the same paths as with aws or gcp.

`python cloud.py HOSTS.SH ADDRESS PORT` serves it; HostProvider is named in a cluster file (provider.type external).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ray.autoscaler.node_provider import NodeProvider

LIMIT = 6


class Cloud:
    """The machines that were rented, by id."""

    def __init__(self, script: str):
        self.script, self.lock, self.machines = script, threading.Lock(), {}

    def create(self, tags: dict[str, str], count: int) -> None:
        for _ in range(count):
            with self.lock:
                used = {one["host"] for one in self.machines.values() if one["state"] != "terminated"}
                host = min(set(range(1, LIMIT + 1)) - used)  # raises ValueError when the cloud is full
                made = {"id": f"m-{len(self.machines)}", "host": host, "tags": dict(tags), "state": "pending"}
                self.machines[made["id"]] = made
            subprocess.run([self.script, "add", str(host)], check=True)
            made["state"] = "running"

    def terminate(self, id: str) -> None:
        with self.lock:
            ended = self.machines[id]["state"] == "terminated"
            self.machines[id]["state"] = "terminated"
        if not ended:
            subprocess.run([self.script, "remove", str(self.machines[id]["host"])], check=True)

    def tag(self, id: str, tags: dict[str, str]) -> None:
        self.machines[id]["tags"].update(tags)

    def list(self) -> list[dict[str, Any]]:
        return list(self.machines.values())


class Handler(BaseHTTPRequestHandler):
    """POST /verb with its arguments as JSON."""

    cloud: Cloud

    def do_POST(self) -> None:
        arguments = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            answer, status = getattr(self.cloud, self.path.strip("/"))(**arguments), 200
        except (ValueError, KeyError, subprocess.CalledProcessError) as error:
            answer, status = repr(error), 500
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        """Says nothing."""


def call(endpoint: str, verb: str, **arguments: Any) -> Any:
    """The cloud's answer. Raises RuntimeError with its reason."""
    request = urllib.request.Request(f"{endpoint}/{verb}", json.dumps(arguments).encode(), method="POST")
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode()) from None


class HostProvider(NodeProvider):
    """Ray's view of the cloud, on the laptop and on the head."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str):
        super().__init__(provider_config, cluster_name)
        self.endpoint, self.network = provider_config["endpoint"], provider_config["network"]

    def _machines(self) -> dict[str, dict[str, Any]]:
        return {one["id"]: one for one in call(self.endpoint, "list")}

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        wanted = {**tag_filters, "ray-cluster-name": self.cluster_name}.items()
        return [
            id for id, one in self._machines().items() if one["state"] != "terminated" and wanted <= one["tags"].items()
        ]

    def is_running(self, node_id: str) -> bool:
        return self._machines()[node_id]["state"] == "running"

    def is_terminated(self, node_id: str) -> bool:
        return self._machines()[node_id]["state"] == "terminated"

    def node_tags(self, node_id: str) -> dict[str, str]:
        return self._machines()[node_id]["tags"]

    def internal_ip(self, node_id: str) -> str:
        return f"{self.network}.{10 + self._machines()[node_id]['host']}"

    external_ip = internal_ip

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        call(self.endpoint, "create", tags={**tags, "ray-cluster-name": self.cluster_name}, count=count)

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        call(self.endpoint, "tag", id=node_id, tags=tags)

    def terminate_node(self, node_id: str) -> None:
        call(self.endpoint, "terminate", id=node_id)

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        return cluster_config


if __name__ == "__main__":
    Handler.cloud = Cloud(sys.argv[1])
    ThreadingHTTPServer((sys.argv[2], int(sys.argv[3])), Handler).serve_forever()
