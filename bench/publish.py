"""Seconds of a publish at the real size: `python -m bench.publish [full lora store] [--senders 1] [--receivers 1]`.

Ray actors, one GPU each (gloo without GPUs): senders hold random float32 masters, sharded by FSDP2, receivers a plain
bfloat16 model whose blocks are compiled and have run once. Rows: a broadcast of all weights, of adapters, and the way
through the object store. All times include both checksums and their comparison; the first publish, which forms the
group, is a row of its own. After each, the receiver runs its forward again: the number of graphs must stay.

The way through the store carries only as many blocks as `--store-blocks` says; the row's value `all_s` scales its
seconds to all bytes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray
import torch
from diffusers.utils import logging
from torch import nn

from actors.clocked import Clocked
from actors.cluster import free_address
from actors.stored_weights import store_bucket, stored_bucket
from actors.weight_ends import WeightReceiver, WeightSender
from bench.real_size import SIZES, blank, fill_random, random_condition, random_latents, random_weights, transformer
from bench.timing import Report, Row
from sage_ray.checksum import merge
from sage_ray.config import LoraConfig
from sage_ray.models.lora import adapt
from sage_ray.models.packed_velocity import PackedVelocity
from sage_ray.parallel import shard, start_process_group
from sage_ray.weight_stream import Meeting
from sage_ray.weights import pack, unpack

PARTS = ("full", "lora", "store")
WAIT_S = 240.0
FRAMES = 5
"""Of the video that the receiver's forward makes."""


def lora_config(rank: int) -> LoraConfig:
    """Adapters on every Linear layer of the blocks."""
    return LoraConfig(rank=rank, alpha=float(rank))


class Sender(Clocked, WeightSender):
    """A learner rank without a learner. lora: rank of adapters, 0 trains all; layers: fewer than the model has."""

    def __init__(self, size: str, rank: int, count: int, device: str):
        self.size, self.rank, self.count, self.device, self.version = SIZES[size], rank, count, device, 0
        self.model: nn.Module | None = None

    def address(self) -> tuple[str, int]:
        return free_address()

    def group(self, address: tuple[str, int]) -> None:
        start_process_group(self.rank, self.count, *address, device=self.device, timeout_s=WAIT_S)

    def make(self, lora: int, layers: int | None) -> int:
        """A random model; bytes of what is published."""
        self.leave_stream()
        self.model = None
        empty = blank(self.size, layers)
        for parameter in empty.context_embedder_2.to_empty(device="cpu").parameters():
            torch.nn.init.ones_(parameter)  # zeros would freeze it
        velocity = PackedVelocity(empty, torch.bfloat16)
        if lora:
            adapt(velocity, lora_config(lora), 0, dtype=torch.float32)
        model = shard(velocity.to("meta"), self.count, self.device).to_empty(device=self.device)
        fill_random(((name, p.to_local()) for name, p in model.named_parameters()), seed=self.rank)  # type: ignore
        self.model = model
        return self.weight_plan().num_bytes

    @contextmanager
    def published(self, average: bool) -> Iterator[tuple[nn.Module, int, torch.dtype]]:
        assert self.model is not None
        yield self.model, self.version, torch.bfloat16

    def step(self) -> None:
        """All weights change."""
        assert self.model is not None
        self.version += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.to_local().mul_(1.01)  # type: ignore[attr-defined]

    def pack(self):
        start = time.monotonic()
        assert self.model is not None
        part = pack(self.model, self.version, self.rank, torch.bfloat16, store_bucket)
        return part, time.monotonic() - start


class Receiver(Clocked, WeightReceiver):
    """A rollout worker without a pipeline."""

    def __init__(self, size: str, device: str):
        self.size, self.device = SIZES[size], torch.device(device)
        self.model: PackedVelocity | None = None

    def make(self, lora: int, layers: int | None, compiled: bool) -> None:
        """A random model that has run once."""
        self.leave_stream()
        self.model = None
        torch._dynamo.reset()
        weights = random_weights(self.size, self.device, layers=layers)
        self.model = PackedVelocity(transformer(self.size, weights, layers), torch.bfloat16, compiled=compiled)
        if lora:
            adapt(self.model, lora_config(lora), 0, dtype=torch.bfloat16)
        self.model.requires_grad_(False)
        self.forward()

    def parameters(self) -> dict[str, torch.Tensor]:
        assert self.model is not None
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

    def expected_names(self) -> frozenset[str]:
        assert self.model is not None
        return self.model.trainable_names

    @torch.no_grad()
    def forward(self) -> int:
        """Run once; graphs that have been compiled so far."""
        assert self.model is not None
        condition, times = random_condition(self.size, self.device), torch.tensor([500.0], device=self.device)
        latents = random_latents(self.size, FRAMES, self.device)
        out = self.model(latents, times, condition.text, condition.byt5)
        assert torch.isfinite(out).all()
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def receive(self):
        return self.receive_into_parameters()

    def unpack(self, *parts):
        start = time.monotonic()
        assert self.model is not None
        return unpack(self.model, parts, self.model.trainable_names, stored_bucket), time.monotonic() - start

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0


def get(refs):
    """Bounded."""
    return ray.get(refs, timeout=WAIT_S)


class Bench:
    """Senders, receivers and what is asked of them in turn."""

    def __init__(self, parsed: argparse.Namespace, device: str):
        gpus = 1 if device == "cuda" else 0
        actor = lambda cls: ray.remote(num_cpus=1, num_gpus=gpus)(cls)  # noqa: E731
        self.parsed, self.device, self.round = parsed, device, 0
        count = parsed.senders
        self.senders = [actor(Sender).remote(parsed.size, rank, count, device) for rank in range(count)]
        self.receivers = [actor(Receiver).remote(parsed.size, device) for _ in range(parsed.receivers)]
        address = get(self.senders[0].address.remote())
        get([s.group.remote(address) for s in self.senders])
        self.host, self.port = get(self.senders[0].open_meeting.remote(WAIT_S))

    def make(self, lora: int, layers: int | None = None) -> int:
        """All models, compiled where they are whole; bytes of what is published."""
        compiled = self.parsed.compile and layers is None
        refs = [s.make.remote(lora, layers) for s in self.senders]
        get([r.make.remote(lora, layers, compiled) for r in self.receivers])
        return sum(get(refs))

    def join(self) -> float:
        """Seconds until everybody is in one group."""
        start, size = time.perf_counter(), len(self.senders) + len(self.receivers)
        plans = ray.put(get([s.weight_plan.remote() for s in self.senders]))
        self.round += 1
        meetings = [Meeting(self.host, self.port, self.round, rank, size) for rank in range(size)]
        members = zip([*self.senders, *self.receivers], meetings, strict=True)
        get([member.join_stream.remote(meeting, self.device, WAIT_S, plans) for member, meeting in members])
        return time.perf_counter() - start

    def broadcast(self) -> dict[str, float]:
        """One publish: seconds of the whole and of its parts, the slowest of each."""
        get([s.step.remote() for s in self.senders])
        start = time.perf_counter()
        sent = [s.send_weights.remote() for s in self.senders]
        held = get([r.receive.remote() for r in self.receivers])
        sent = get(sent)
        self.compare([one[0] for one in sent], [one[0] for one in held])
        parts = [times for _, times in (*sent, *held)]
        whole = {"seconds": time.perf_counter() - start}
        return whole | {key: max(t.get(key, 0.0) for t in parts) for times in parts for key in times}

    def store(self) -> dict[str, float]:
        """One publish through the object store."""
        get([s.step.remote() for s in self.senders])
        start = time.perf_counter()
        pairs = [s.pack.options(num_returns=2).remote() for s in self.senders]
        pack_s = max(get([seconds for _, seconds in pairs]))
        answers = get([r.unpack.remote(*[part for part, _ in pairs]) for r in self.receivers])
        whole = time.perf_counter() - start
        sent = [get(part).content for part, _ in pairs]
        self.compare(sent, [held for held, _ in answers])
        return {"seconds": whole, "pack_s": pack_s, "unpack_s": max(seconds for _, seconds in answers)}

    @staticmethod
    def compare(sent, held) -> None:
        """Raises RuntimeError with a tensor's name."""
        whole = merge(sent)
        for one in held:
            if one.digest != whole.digest:
                raise RuntimeError(f"{whole.difference(one)} is not what was sent")

    def graphs(self) -> int:
        """Compiled by the receivers so far, after another forward."""
        return sum(get([r.forward.remote() for r in self.receivers]))


def median(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Key by key."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def broadcast_rows(bench: Bench, report: Report, name: str, lora: int) -> None:
    """The forming of a group, and publishes."""
    start = time.perf_counter()
    num_bytes = bench.make(lora)
    made, graphs = time.perf_counter() - start, bench.graphs()
    report.add(Row("publish", f"{name}: models made in {made:.0f} s; group formed", 0, bench.join()))
    runs = [bench.broadcast() for _ in range(1 + bench.parsed.repeats)]
    values = median(runs[1:])
    seconds = values.pop("seconds")
    values |= {"GB": num_bytes / 1e9, "GB/s": num_bytes / 1e9 / seconds, "first_s": runs[0]["seconds"]}
    values |= {"slowest_s": max(run["seconds"] for run in runs[1:]), "new_graphs": bench.graphs() - graphs}
    values |= {"peak_GB": max(get([r.peak.remote() for r in bench.receivers])) / 1e9}
    report.add(Row("publish", f"{name}: broadcast and checksums", 0, seconds, values=values))


def store_rows(bench: Bench, report: Report, all_bytes: float) -> None:
    """The object store carries a part of the model."""
    num_bytes = bench.make(0, bench.parsed.store_blocks)
    graphs = bench.graphs()
    runs = [bench.store() for _ in range(1 + bench.parsed.store_repeats)]
    values = median(runs[1:])
    seconds = values.pop("seconds")
    scale = all_bytes / num_bytes if all_bytes else 1.0
    values |= {"GB": num_bytes / 1e9, "GB/s": num_bytes / 1e9 / seconds, "first_s": runs[0]["seconds"]}
    values |= {"all_s": seconds * scale, "new_graphs": bench.graphs() - graphs}
    report.add(Row("publish", "object store and checksums, a part of the model", 0, seconds, values=values))


def main(arguments: Sequence[str] | None = None) -> Report:
    """Every row is printed, and written to --json, as it comes."""
    parser = argparse.ArgumentParser(prog="python -m bench.publish", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--size", choices=SIZES, default="official", help="small takes seconds on a CPU")
    parser.add_argument("--senders", type=int, default=1)
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--lora", type=int, default=32, help="rank of the adapters")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--store-repeats", type=int, default=2)
    parser.add_argument("--store-blocks", type=int, help="blocks of the model that goes through the store; all")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="run the receiver's blocks eagerly")
    parser.add_argument("--store-bytes", type=int, default=40_000_000_000, help="size of the object store")
    parser.add_argument("--json", type=Path, help="where the rows are written too")
    parsed = parser.parse_args(arguments)
    if unknown := sorted(set(parsed.parts) - set(PARTS)):
        parser.error(f"there is no part {unknown[0]}, there are {', '.join(PARTS)}")
    logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    facts = {"card": card, "torch": torch.__version__, "size": parsed.size, "senders": parsed.senders}
    facts |= {"receivers": parsed.receivers}
    print("  ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    report, parts = Report(parsed.json, facts), parsed.parts or PARTS
    started = not ray.is_initialized()
    if started:
        store = parsed.store_bytes if parsed.size == "official" and "store" in parts else 200_000_000
        cpus = parsed.senders + parsed.receivers
        ray.init(
            address="local", num_cpus=cpus, object_store_memory=store, include_dashboard=False, log_to_driver=False
        )
    try:
        bench = Bench(parsed, device)
        if "full" in parts:
            broadcast_rows(bench, report, "all weights", 0)
        if "lora" in parts:
            broadcast_rows(bench, report, f"adapters of rank {parsed.lora}", parsed.lora)
        if "store" in parts:
            full = [row.values["GB"] * 1e9 for row in report.rows if "GB" in row.values]
            store_rows(bench, report, full[0] if "full" in parts else 0.0)
    finally:
        if started:
            ray.shutdown()
    return report


if __name__ == "__main__":
    main()
