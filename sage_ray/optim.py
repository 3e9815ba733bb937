"""The learner's optimizers, Muon and AdamW, and the learning rate's schedule.

Every step on FSDP2 shards equals the step on whole tensors. `torch.optim.Muon` is not used: on DTensors (torch 2.13) it
needs 13 collectives per matrix, rounds partial sums of the Gram matrices to bfloat16 (1e-2 of the update on 2 ranks),
refuses matrices with empty shards (3 rows on 4 ranks), and its Newton-Schulz iteration knows bfloat16 only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.adamw import adamw

from sage_ray.config import OptimizerConfig

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of p(s) = a s + b s^3 + c s^5, which drives singular values in (0, 1] towards 1 (Jordan et al., Muon)."""


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], settings: OptimizerConfig
) -> torch.optim.Optimizer:
    """The optimizer of all parameters that require a gradient; the official run is muon with betas .95/.95, eps 1e-8.

    With "muon" every 2-D weight goes to Muon and everything else to AdamW with the same learning rate and weight decay.
    That includes the 5-D patch embedding: it is the input layer, which Muon's author leaves to AdamW. (The official
    code gives it to Muon, flattened to [out, rest]; it is one small weight.)

    Args:
        named_parameters: plain tensors, or DTensors sharded on dim 0 of a 1-D mesh; the same order on every rank.
        settings: checked by config_check.
    Raises: ValueError when nothing is trained, or a parameter is sharded in another way.
    """
    trainable = [(key, p) for key, p in named_parameters if p.requires_grad]
    _require(bool(trainable), "named_parameters", len(trainable), "must hold a parameter that requires a gradient")
    for key, p in trainable:
        if isinstance(p, DTensor):
            _require(p.placements == (Shard(0),), key, p.placements, "must be sharded on dim 0 of a 1-D mesh")
    common = {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    parameters = [p for _, p in trainable]
    if settings.name == "adamw":
        return torch.optim.AdamW(parameters, **common)
    return Muon(parameters, {**common, "momentum": settings.momentum, "ns_dtype": getattr(torch, settings.muon_dtype)})


class Muon(torch.optim.Optimizer):
    """Muon for matrices, AdamW for the rest: one optimizer with a parameter group of each kind (`use_muon`).

    B <- momentum B + G,  W <- (1 - lr decay) W - lr 0.2 sqrt(max(rows, cols)) NS(G + momentum B): Nesterov momentum,
    decoupled decay and the update scale of "Muon is scalable for LLM training", as the official run has them.
    State is sharded like its parameter: `momentum_buffer`, or AdamW's `exp_avg` and `exp_avg_sq` (and `step`).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], defaults: dict[str, Any]) -> None:
        kinds = {kind: [p for p in parameters if (p.ndim == 2) == kind] for kind in (True, False)}
        super().__init__([{"params": ps, "use_muon": kind} for kind, ps in kinds.items() if ps], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step, a collective call where sharded; the same parameters must lack gradients on every rank."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            active = [p for p in group["params"] if p.grad is not None]
            (self._step_muon if group["use_muon"] else self._step_adamw)(group, active)
        return loss

    def _step_muon(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Largest first, and as many at once as there are ranks: each rank orthogonalises one of about equal cost."""
        by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
        for p in sorted(params, key=Tensor.numel, reverse=True):
            by_mesh.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
        for mesh, of_mesh in by_mesh.items():
            size = mesh.size() if mesh is not None else 1
            for start in range(0, len(of_mesh), size):
                self._update_matrices(group, of_mesh[start : start + size], mesh)

    def _update_matrices(self, group: dict[str, Any], params: list[Tensor], mesh: DeviceMesh | None) -> None:
        directions = []
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            grad, buffer = _local(p.grad), _local(self.state[p]["momentum_buffer"])
            buffer.mul_(group["momentum"]).add_(grad)
            directions.append(grad.add(buffer, alpha=group["momentum"]).to(group["ns_dtype"]))
        for p, update in zip(params, _orthogonalise(directions, [p.shape for p in params], mesh), strict=True):
            scale = 0.2 * math.sqrt(max(p.shape))
            _local(p).mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)

    def _step_adamw(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """torch's own AdamW on local shards; it works element by element."""
        for p in params:
            if not self.state[p]:
                moments = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
                self.state[p].update(moments, step=torch.tensor(0.0))
        states, (beta1, beta2) = [self.state[p] for p in params], group["betas"]
        means, squares = ([_local(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq"))
        shards, grads = [_local(p) for p in params], [_local(p.grad) for p in params]
        steps = [state["step"] for state in states]
        numbers = {key: group[key] for key in ("lr", "weight_decay", "eps")} | {"beta1": beta1, "beta2": beta2}
        adamw(shards, grads, means, squares, [], steps, amsgrad=False, maximize=False, **numbers)


def newton_schulz(matrix: Tensor) -> Tensor:
    """Five quintic Newton-Schulz steps in the matrix' own dtype: U p(...p(S / |G|)...) V^T for G = U S V^T.

    Args: matrix: [rows, cols]. Returns: [rows, cols]; singular values end in [0.68, 1.21] if they were above 0.002 of
    the Frobenius norm, lower if not. A zero matrix stays zero.
    """
    a, b, c = NS_COEFFICIENTS
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def _orthogonalise(shards: list[Tensor], shapes: list[torch.Size], mesh: DeviceMesh | None) -> list[Tensor]:
    """Newton-Schulz of at most as many whole matrices as there are ranks, matrix i on rank i: two all-to-alls.

    Args: shards: this rank's rows [local rows, cols] of every matrix, possibly none. shapes: of the whole matrices.
    Returns: this rank's rows of every result.
    """
    if mesh is None or mesh.size() == 1:
        return [newton_schulz(shard) for shard in shards]
    rank, size = mesh.get_local_rank(), mesh.size()
    to_owner = [s.numel() for s in shards] + [0] * (size - len(shards))
    rows, cols = shapes[rank] if rank < len(shapes) else (0, 0)
    chunk = -(-rows // size)  # As torch.chunk and FSDP2 split dim 0; the last ranks may hold fewer rows, or none.
    to_rank = [max(0, min(chunk, rows - chunk * r)) * cols for r in range(size)]
    sent = torch.cat([s.flatten() for s in shards])
    whole = sent.new_empty(rows * cols)
    dist.all_to_all_single(whole, sent, to_rank, to_owner, group=mesh.get_group())
    result = newton_schulz(whole.view(rows, cols)).flatten() if rows else whole
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, result, to_owner, to_rank, group=mesh.get_group())
    return [part.view_as(s) for part, s in zip(received.split(to_owner[: len(shards)]), shards, strict=True)]


def learning_rate_factor(step: int, *, schedule: str, warmup_steps: int, total_steps: int, floor: float = 0.0) -> float:
    """Factor of the learning rate at optimizer step `step` (0-based).

    (step + 1) / warmup_steps up to step warmup_steps - 1, the peak; then 1 ("constant"), or ("cosine")
    floor + (1 - floor) (1 + cos(pi u)) / 2 with u from 0 at the peak to 1 at total_steps, and floor from there on.

    Args: warmup_steps: in [0, total_steps], 0 starts at 1. floor: in [0, 1]; warm-up may start below it.
    Raises: ValueError naming key, value and rule.
    """
    _require(step >= 0, "step", step, "must be at least 0")
    _require(schedule in ("constant", "cosine"), "schedule", schedule, "must be constant or cosine")
    _require(total_steps >= 1, "total_steps", total_steps, "must be at least 1")
    _require(0 <= warmup_steps <= total_steps, "warmup_steps", warmup_steps, f"must be in [0, {total_steps}]")
    _require(0 <= floor <= 1, "floor", floor, "must be in [0, 1]")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    peak = max(warmup_steps - 1, 0)
    progress = min(1.0, (step - peak) / (total_steps - peak))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets the learning rate of every parameter group. Raises: ValueError naming key, value and rule."""
    _require(0 <= learning_rate < math.inf, "learning_rate", learning_rate, "must be finite and at least 0")
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard, which shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _require(holds: bool, key: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"{key}={value!r}: {rule}")
