"""launch.py submit, logs, stop, status, scale and plan against a real cluster with token authentication."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.deploy.conftest import TOKEN, Cluster, ended
from tests.small import ROOT

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif("SAGE_HOSTS" not in os.environ, reason="minutes on two cores: make test-cluster runs it"),
]
TRAIN = """train cluster.device=cpu data.num_prompts=2 data.group_size=2 save_interval=100 rollout.num_workers=1
sampling.num_steps=5 evaluation.num_prompts=0 optimizer.schedule=constant""".split()


def until(ready, what: str) -> None:
    deadline = time.monotonic() + 240
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.3)


@pytest.mark.timeout(600)
def test_two_runs_at_once_stop_and_go_on(cluster: Cluster, tmp_path: Path) -> None:
    """One breaks, with its own exit code; the other is stopped, has saved, and is submitted again."""
    long, broken = tmp_path / "long", tmp_path / "broken"
    words = [*TRAIN, f"output_dir={long}", "num_iterations=1000"]
    code, job, told = cluster.launch("submit", "--no-wait", "--job", "long", *words)
    assert (code, job) == (0, "long\n") and f"job long on the cluster at {cluster.dashboard}" in told
    breaks = cluster.start("submit", *TRAIN, f"output_dir={broken}", "num_iterations=9", "optimizer.learning_rate=1e35")
    until(lambda: (long / "metrics.jsonl").is_file(), "the first iteration")
    code, log, told = ended(breaks)
    assert code == 1, log + told
    assert "stopped: after policy version 1" in log and "ended with exit code 1" in told  # the log is streamed
    code, table, _ = cluster.launch("status")
    states = {line.split()[1]: line for line in table.splitlines()}
    assert code == 0 and "RUNNING" in states["long"] and "FAILED" in states["broken"]
    assert "exit code 1" in states["broken"]
    code, said, _ = cluster.launch("stop", "long")
    assert code == 0 and said.startswith("stopped: by SIGTERM after iteration"), said
    (checkpoint,) = (long / "checkpoints").iterdir()
    assert f"the last good checkpoint is {checkpoint}" in said
    finished = json.loads((checkpoint / "trainer.json").read_text())["iteration"]
    assert finished == len((long / "metrics.jsonl").read_text().splitlines()) > 0
    code, line, _ = cluster.launch("status", "long")
    assert code == 143 and "STOPPED" in line
    again = [*TRAIN, f"output_dir={long}", f"num_iterations={finished + 1}", "resume=auto"]
    code, log, told = cluster.launch("submit", *again)
    assert code == 0 and f"resuming after iteration {finished} from" in log, log + told
    for out in (log, told, table):
        assert TOKEN not in out


def test_what_is_refused_is_one_clear_line(cluster: Cluster, tmp_path: Path) -> None:
    """Tokens, addresses, jobs and settings."""
    nowhere = "http://127.0.0.1:9"
    submit = ["submit", "train", f"output_dir={tmp_path / 'run'}"]
    wrong = "wrong-token-of-somebody-else-0123456789"
    cases = [
        (["status"], {"RAY_AUTH_TOKEN": wrong}, "the cluster refuses the token of this machine"),
        (submit, {"RAY_AUTH_TOKEN": wrong}, "the cluster refuses the token of this machine"),
        (["status"], {"RAY_AUTH_MODE": "disabled"}, "the cluster wants a token: set RAY_AUTH_MODE=token"),
        (["status"], {"RAY_AUTH_MODE": "tokens"}, "RAY_AUTH_MODE='tokens': must be token or disabled"),
        (
            [*submit[:1], "--address", nowhere, *submit[1:]],
            {},
            f"{nowhere}: no cluster answers (ConnectionError); start",
        ),
        (["logs", "nothing"], {}, "Job nothing does not exist"),
        ([*submit, "sampling.num_step=3"], {}, "unknown key 'sampling.num_step'"),
        (["submit", "train"], {}, "output_dir='outputs/shapes_cpu': must be an absolute path on the cluster"),
        (["submit", "dance"], {}, "submit dance: must be followed by one of train, "),
        (["submit", "train", "--config", "/etc/hosts"], {}, "/etc/hosts"),
        (["scale", "3"], {"RAY_ADDRESS": cluster.address}, "no run on this cluster listens"),
        (["scale", "0"], {"RAY_ADDRESS": cluster.address}, "scale 0: must be in [1, 4096]"),
    ]
    for start in range(0, len(cases), 3):
        some = cases[start : start + 3]
        for process, (words, _, expected) in zip([cluster.start(*w, **v) for w, v, _ in some], some, strict=True):
            code, out, error = ended(process)
            assert code == 2 and not out, (words, out, error)
            (line,) = error.splitlines()
            assert line.startswith("error: ") and expected in line, (words, line)
            assert TOKEN not in line and wrong not in line


def test_gpus_that_are_not_there(cluster: Cluster, tmp_path: Path) -> None:
    """The cluster has three. Four are an error at once; with cluster.grows they are waited for, and need and have are
    told; the plan of the same cluster says so too."""
    words = [
        f"output_dir={tmp_path / 'run'}",
        "cluster.device=cuda",
        "cluster.share_gpu=false",
        "rollout.num_workers=2",
    ]
    joined = {"RAY_ADDRESS": cluster.address}
    waits = [*words, "cluster.grows=true", "cluster.start_timeout_s=3"]
    processes = [cluster.start("train", *words, **joined), cluster.start("train", *waits, **joined)]
    need = "2 rollout groups of 1, 1 reward workers and 1 learner ranks need 4 GPUs, the cluster has 3"
    code, _, error = ended(processes[0])
    assert code == 2 and f"error: cluster.device: {need}" in error.splitlines(), error
    code, _, error = ended(processes[1])
    stopped = [line for line in error.splitlines() if line.startswith("stopped: ")]
    assert code == 1 and len(stopped) == 1, error
    for part in ("waited 3 s for reward-0: 1 times 1 GPUs on one node", "GPUs of the nodes are [3.0]", "'GPU': 3.0"):
        assert part in stopped[0]
    assert not (tmp_path / "run").exists()
    code, out, error = cluster.launch("plan", *words, **joined)
    assert code == 2 and need in error and f"the cluster at {cluster.address}" not in out
    code, out, error = cluster.launch("plan", *words[:-1], "rollout.num_workers=1", **joined)
    assert code == 0 and f"the cluster at {cluster.address}" in out, error
    assert "node 0 (all)" in out and "learner, rollout-0" in out


PROGRAM = """
import sys, time, ray
from actors.layout import Node
from actors.places import cluster_nodes, place_everything, place_of
from actors.cluster import start_actor
from actors.scale import desired_workers, listen, stop_listening
from sage_ray.config import Config

class Where:
    def gpus(self):
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]

ray.init(namespace="sage_ray", log_to_driver=False)
assert cluster_nodes() == [Node(3.0, "all")]
config = Config()
config.learner.num_ranks = config.learner.sp_size = 2
config.reward.gpus_per_worker = 0.5
config.cluster.node_roles = {"learner": "all", "reward": "!learner"}
config.rollout.num_workers, config.cluster.share_gpu = 1, True
layout = place_everything(config)
assert (layout.gpus_rollout, layout.gpus_reward, layout.gpus_learner) == (0.5, 0.5, 1), layout
names = {"learner-0": 1, "learner-1": 1, "rollout-0": 0.5, "reward-0": 0.5}
actors = [start_actor(Where, share, name=name) for name, share in names.items()]
ranks, shared = ray.get([actor.gpus.remote() for actor in actors[:2]]), ray.get([a.gpus.remote() for a in actors[2:]])
assert sorted(ranks + shared[:1]) == [["0"], ["1"], ["2"]] and shared[0] == shared[1], (ranks, shared)
listen("a-run")
assert desired_workers() is None
print("listens", flush=True)
while desired_workers() is None:
    time.sleep(0.1)
print(desired_workers(), flush=True)
stop_listening()
assert desired_workers() is None
"""


def test_a_run_that_listens_is_asked_and_sits_where_it_was_planned(cluster: Cluster) -> None:
    """Two ranks in one bundle get a GPU each, rollout and reward share the third; then `scale` reaches the driver."""
    variables = cluster.variables | {"RAY_ADDRESS": cluster.address, "PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=variables
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "listens\n"
    joined = {"RAY_ADDRESS": cluster.address}
    code, _, error = cluster.launch("scale", "3", "--run", "another", **joined)
    assert code == 2 and "--run another: no such run listens; those that do: a-run (job " in error
    code, out, error = cluster.launch("scale", "5", **joined)
    assert code == 0 and out.startswith("asked a-run (job ") and out.endswith("for 5 rollout groups\n"), error
    assert driver.communicate(timeout=60)[0] == "5\n" and driver.returncode == 0
    code, _, error = cluster.launch("scale", "5", **joined)
    assert code == 2 and "no run on this cluster listens" in error
