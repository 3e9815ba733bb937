"""Memory of a learner rank and of a rollout worker by the tensors that are there, beside what the plan says of it.

Gradients, optimizer state and the stash of the references come with the first update; their bytes follow from the
tensors that they are made for. Activations cannot be seen at the start and are the plan's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from sage_ray.config import Config
from sage_ray.cost import H100
from sage_ray.models.hunyuan_video import HunyuanVideo
from sage_ray.policy_update import PolicyUpdate
from sage_ray.prediction import SMALLEST, Prediction, keeps_whole_gradients, predict, read_dims
from sage_ray.references import ReferenceBank
from sage_ray.training_schedule import training_schedule

TOLERANCE = 0.1
"""Share by which a part may differ from the plan without a warning."""
SMALL_PART = 0.01
"""Share of the whole below which a part is not worth one."""


@dataclass(frozen=True)
class MemoryPart:
    """Bytes of one part. now: held at this moment; full: once the first update is done; on_host: not on the device."""

    name: str
    now: int
    full: int
    on_host: bool = False


def learner_memory(rule: PolicyUpdate, config: Config) -> list[MemoryPart]:
    """What a rank keeps, part by part."""
    parameters = list(rule.model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    whole = keeps_whole_gradients(config, training_schedule(config).rule.num_trained)
    gradients = sum(4 * (p.numel() if whole else _local(p).numel()) for p in trained)
    states = (value for state in rule.optimizer.state.values() for value in state.values())
    moments = [value for value in states if torch.is_tensor(value) and value.dim()]
    several = config.loss.num_updates * config.loss.num_epochs > 1
    copies = {*rule.held, *(("sampling",) if several else ())}
    parts = [
        MemoryPart("frozen base", *(num_bytes(p for p in parameters if not p.requires_grad),) * 2),
        MemoryPart("masters", *(num_bytes(trained),) * 2),
        MemoryPart("gradients", num_bytes(p.grad for p in trained if p.grad is not None), gradients),
        MemoryPart("optimizer", num_bytes(moments), _moment_bytes(rule.optimizer)),
        _bank("references", rule.bank, len(copies), num_bytes(trained)),
        _bank("moving average", rule.averages, int(config.optimizer.ema_decay is not None), num_bytes(trained)),
    ]
    return [part for part in parts if part.full]


def rollout_memory(model: HunyuanVideo) -> list[MemoryPart]:
    """What a rollout worker keeps, on its device or, by turns, on the host."""
    parts = {
        "weights": [*model.velocity.parameters(), *model.velocity.buffers()],
        "VAE": [*model.vae.parameters(), *model.vae.buffers()],
        "text encoders": model.prompts.tensors(),
    }
    sizes = {name: num_bytes(tensors) for name, tensors in parts.items()}
    return [MemoryPart(name, size, size, on_host=name == "text encoders") for name, size in sizes.items()]


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the local shards; those that wait elsewhere (Parked) count as if they were there."""
    return sum(t.numel() * t.element_size() for t in map(_local, tensors))


def expected_memory(config: Config) -> Prediction | None:
    """The plan's prediction; None where it makes none."""
    dims = read_dims(Path(config.model.path))
    if dims is None or dims.parameters < SMALLEST or config.model.dtype != "bfloat16":
        return None
    return predict(config, dims, training_schedule(config).rule.num_trained, H100())


def memory_lines(role: str, parts: Sequence[MemoryPart], plan: Mapping[str, float] | None) -> list[str]:
    """The report of one role, and a warning for every part that is further from the plan than TOLERANCE.

    Args: plan: part -> bytes; None where nothing is predicted. Its parts that no tensor shows are added as they are.
    """
    plan, known = plan or {}, {part.name for part in parts}
    here, host = [p for p in parts if not p.on_host], [p for p in parts if p.on_host]
    total = sum(part.full for part in here) + sum(size for name, size in plan.items() if name not in known)
    words = [f"{part.name} {_size(part.full)}" + _said(part, plan) for part in here]
    words += [f"{name} {_size(size)} (by the plan)" for name, size in plan.items() if name not in known]
    line = f"memory of a {role}: {_size(total)}"
    if plan:
        line += f" (plan {_size(sum(plan.values()))})"
    lines = [f"{line} = {' + '.join(words)}"]
    if host:
        lines[0] += "; on the host " + ", ".join(f"{part.name} {_size(part.full)}" for part in host)
    for part in here:
        planned = plan.get(part.name, 0.0)
        if plan and abs(part.full - planned) > max(TOLERANCE * planned, SMALL_PART * total):
            lines.append(
                f"warning: memory of a {role}: {part.name} takes {_size(part.full)}, the plan says {_size(planned)}"
            )
    return lines


def _said(part: MemoryPart, plan: Mapping[str, float]) -> str:
    words = [f"plan {_size(plan[part.name])}"] if part.name in plan else []
    if part.now != part.full:
        words.append(f"now {_size(part.now)}")
    return f" ({', '.join(words)})" if words else ""


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def _bank(name: str, bank: ReferenceBank, copies: int, trained: int) -> MemoryPart:
    """Copies in the bank's dtype, and the live weights that wait while one is used."""
    full = copies * trained * bank.dtype.itemsize // 4 + (trained if copies else 0)
    return MemoryPart(name, num_bytes(bank.all_tensors()), full, on_host=bank.offload)


def _moment_bytes(optimizer: torch.optim.Optimizer) -> int:
    """One moment of what Muon trains, two of the rest."""
    kinds = ((1 if group.get("use_muon") else 2, group["params"]) for group in optimizer.param_groups)
    return sum(moments * num_bytes(parameters) for moments, parameters in kinds)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
