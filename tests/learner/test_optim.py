"""Muon and AdamW: numbers by hand, plain against FSDP2 shards on gloo ranks, state, and the schedule."""

from __future__ import annotations

import copy
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from sage_ray.config import OptimizerConfig
from sage_ray.optim import Muon, build_optimizer, learning_rate_factor, newton_schulz, set_learning_rate

SHAPES = {
    "wide": (5, 7), "tall": (7, 5), "three_rows": (3, 64), "one_row": (1, 6), "big": (64, 16), "even": (8, 8),
    "patch": (6, 3, 1, 2, 2), "vector": (5,), "single": (1,),
}  # fmt: skip
NUM_MATRICES, NUM_STEPS, RANKS = 6, 5, (1, 2, 4)
CASES = {
    "adamw": ("adamw", torch.bfloat16),
    "muon_float32": ("muon", torch.float32),
    "muon_bfloat16": ("muon", torch.bfloat16),
}
TOLERANCE = {"adamw": 1e-5, "muon_float32": 1e-5, "muon_bfloat16": 1e-2}
"""|W_n - W_1| / |W_1 - W_0| of n ranks against one plain process, over each parameter."""


class Weights(nn.Module):
    """One parameter per entry of SHAPES and a frozen matrix; the gradients of a forward pass are `gradients(step)`."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)

    def forward(self, step: int) -> torch.Tensor:
        terms = [(self.get_parameter(name) * grad).sum() for name, grad in gradients(step).items()]
        return torch.stack(terms).sum() + self.frozen.sum()


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def optimizer_of(
    model: nn.Module, name: str, ns_dtype: torch.dtype = torch.bfloat16, **others
) -> torch.optim.Optimizer:
    dtype = str(ns_dtype).removeprefix("torch.")
    settings = OptimizerConfig(**{"name": name, "learning_rate": 1e-2, "muon_dtype": dtype, **others})
    return build_optimizer(model.named_parameters(), settings)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter, gathered."""
    values = {name: p.detach() for name, p in model.named_parameters()}
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for n, v in values.items()}


def sharded(world_size: int) -> nn.Module:
    model = Weights()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",)))
    return model


def continued_after_restore(world_size: int, name: str) -> dict[str, torch.Tensor]:
    """The same five steps, with the optimizer's state saved as for a checkpoint after three and put into another."""
    model = sharded(world_size)
    optimizer = optimizer_of(model, name)
    take_steps(model, optimizer, range(3))
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    another = optimizer_of(model, name, learning_rate=1.0, weight_decay=0.5)
    set_optimizer_state_dict(model, another, state)
    for p in model.parameters():
        kept = [v for key, v in another.state[p].items() if key != "step"] if p.requires_grad else []
        assert all(isinstance(v, DTensor) and v.placements == p.placements for v in kept)
    take_steps(model, another, range(3, NUM_STEPS))
    return whole(model)


def run_rank(rank: int, world_size: int, folder: str) -> None:
    """One of `world_size` ranks; the first writes the weights of every case, and the calls of all-to-all."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    calls: Counter[str] = Counter()
    all_to_all = dist.all_to_all_single
    dist.all_to_all_single = lambda *args, **kwargs: calls.update(["all"]) or all_to_all(*args, **kwargs)
    results: dict[str, object] = {}
    for case, (name, ns_dtype) in CASES.items():
        model = sharded(world_size)
        calls.clear()
        take_steps(model, optimizer_of(model, name, ns_dtype), range(NUM_STEPS))
        results[case], results[f"{case}_calls"] = whole(model), calls["all"]
    replicated = nn.Parameter(
        distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (world_size,)), [Replicate()])
    )
    with pytest.raises(ValueError, match="must be sharded on dim 0"):
        optimizer_of(nn.ParameterDict({"w": replicated}), "muon")
    for name in ("adamw", "muon"):
        results[f"{name}_restored"] = continued_after_restore(world_size, name)
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")
    dist.barrier()
    dist.destroy_process_group()


def plain_run(name: str, ns_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = Weights()
    take_steps(model, optimizer_of(model, name, ns_dtype), range(NUM_STEPS))
    return whole(model)


@pytest.mark.parametrize("world_size", RANKS)
def test_shards_equal_one_plain_process(world_size: int, tmp_path: Path) -> None:
    """Real backward passes and real FSDP2; on 4 ranks matrices have uneven and empty shards."""
    mp.spawn(run_rank, (world_size, str(tmp_path)), nprocs=world_size)
    results = torch.load(tmp_path / "results.pt")
    start = whole(Weights())
    for case, (name, ns_dtype) in CASES.items():
        plain = plain_run(name, ns_dtype)
        for key in SHAPES:
            moved, apart = (plain[key] - start[key]).norm(), (results[case][key] - plain[key]).norm()
            assert moved > 0.01, (case, key)
            assert apart / moved <= TOLERANCE[case], (case, key, float(apart / moved))
        assert torch.equal(results[case]["frozen"], start["frozen"])
    per_step = 0 if world_size == 1 else 2 * math.ceil(NUM_MATRICES / world_size)
    assert results["muon_bfloat16_calls"] == NUM_STEPS * per_step
    for restored, case in {"adamw_restored": "adamw", "muon_restored": "muon_bfloat16"}.items():
        assert all(torch.equal(results[restored][key], results[case][key]) for key in SHAPES), restored


def polynomial(singular: np.ndarray) -> np.ndarray:
    """Newton-Schulz of a diagonal matrix, on its diagonal."""
    s = singular / (np.sqrt((singular**2).sum()) + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


def one(value: torch.Tensor) -> nn.ParameterDict:
    return nn.ParameterDict({"w": nn.Parameter(value)})


def test_muon_by_hand_on_a_diagonal_matrix() -> None:
    """Two steps in float64; lr 0.1, decay 0.01, momentum 0.95, scale 0.2 sqrt(2)."""
    model = one(torch.diag(torch.tensor([1.0, -2.0], dtype=torch.float64)))
    optimizer = optimizer_of(model, "muon", torch.float64, learning_rate=0.1)
    expected, buffer = np.array([1.0, -2.0]), np.zeros(2)
    for gradient in ([3.0, 1.0], [1.0, 2.0]):
        model["w"].grad = torch.diag(torch.tensor(gradient, dtype=torch.float64))
        optimizer.step()
        buffer = 0.95 * buffer + gradient
        direction = polynomial(np.array(gradient) + 0.95 * buffer)
        expected = expected * (1 - 0.1 * 0.01) - 0.1 * 0.2 * math.sqrt(2) * direction
        np.testing.assert_allclose(np.diag(model["w"].detach().numpy()), expected, rtol=1e-12)
    assert model["w"].detach()[0, 1] == 0.0


def test_muons_scale_is_that_of_the_longer_side() -> None:
    """A rank-one gradient has one singular value, which starts at 1 and ends at p^5(1); lr 1, no decay."""
    model = one(torch.zeros(2, 50, dtype=torch.float64))
    optimizer = optimizer_of(model, "muon", torch.float64, learning_rate=1.0, weight_decay=0.0)
    model["w"].grad = torch.zeros_like(model["w"])
    model["w"].grad[1, 7] = -4.0
    optimizer.step()
    assert float(model["w"].detach()[1, 7]) == pytest.approx(0.2 * math.sqrt(50) * polynomial(np.ones(1))[0], rel=1e-6)
    assert int(model["w"].count_nonzero()) == 1


@pytest.mark.parametrize("name, shape", [("adamw", (2,)), ("muon", (2,)), ("muon", (2, 1, 1, 1, 1))])
def test_adamw_by_hand(name: str, shape: tuple[int, ...]) -> None:
    """First step m / sqrt(v) = sign(g): 1 - 0.1 (0.01 + 1); the second by definition. betas .9/.99, eps ~ 0."""
    model = one(torch.ones(shape, dtype=torch.float64))
    optimizer = optimizer_of(model, name, learning_rate=0.1, beta1=0.9, beta2=0.99, eps=1e-15)
    model["w"].grad = torch.tensor([3.0, -0.5], dtype=torch.float64).view(shape)
    optimizer.step()
    np.testing.assert_allclose(model["w"].detach().numpy().ravel(), [0.899, 1.099], rtol=1e-12)
    model["w"].grad = torch.tensor([1.0, 0.0], dtype=torch.float64).view(shape)
    optimizer.step()
    m = np.array([0.9 * 0.3 + 0.1, 0.9 * -0.05]) / (1 - 0.9**2)
    v = np.array([0.99 * 0.09 + 0.01, 0.99 * 0.0025]) / (1 - 0.99**2)
    expected = np.array([0.899, 1.099]) * (1 - 0.001) - 0.1 * m / np.sqrt(v)
    np.testing.assert_allclose(model["w"].detach().numpy().ravel(), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (torch.bfloat16, 0.15)])
@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (32, 48)])
def test_newton_schulz_keeps_directions_and_levels_singular_values(shape, dtype, tolerance: float) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-4
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    result = newton_schulz(matrix.to(dtype)).float()
    assert result.shape == matrix.shape
    values = torch.linalg.svdvals(result)
    assert 0.6 < values.min() and values.max() < 1.3
    rotated = u.T @ result @ vt.T
    assert (rotated - torch.diag(rotated.diagonal())).abs().max() < tolerance


def test_newton_schulz_of_zero_is_zero() -> None:
    assert torch.equal(newton_schulz(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    model = Weights()
    optimizer = optimizer_of(model, "muon")
    take_steps(model, optimizer, range(1))
    assert isinstance(optimizer, Muon)
    for name, p in model.named_parameters():
        state = {"exp_avg", "exp_avg_sq", "step"} if p.ndim != 2 else {"momentum_buffer"}
        assert set(optimizer.state[p] if p.requires_grad else state) == state, name
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(SHAPES)
    assert isinstance(optimizer_of(model, "adamw"), torch.optim.AdamW)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_round_trip_is_bitwise(name: str, tmp_path: Path) -> None:
    model = Weights()
    optimizer = optimizer_of(model, name)
    take_steps(model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    take_steps(model, optimizer, range(3, 5))
    saved = torch.load(tmp_path / "state.pt")
    other = Weights()
    other.load_state_dict(saved["model"])
    restored = optimizer_of(other, name, learning_rate=1.0)
    restored.load_state_dict(saved["optimizer"])
    take_steps(other, restored, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(whole(model).values(), whole(other).values(), strict=True))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_without_gradient_nothing_moves(name: str) -> None:
    """A frozen weight with a gradient stays, and so does a trainable one without."""
    model = Weights()
    optimizer = optimizer_of(model, name)
    start = whole(model)
    model.frozen.grad = torch.ones(3, 3)
    model.big.grad = torch.ones(64, 16)
    optimizer.step()
    assert {key for key, value in whole(model).items() if not torch.equal(value, start[key])} == {"big"}


def test_set_learning_rate_reaches_every_group() -> None:
    model = Weights()
    optimizer = optimizer_of(model, "muon")
    start = whole(model)
    set_learning_rate(optimizer, 0.0)
    take_steps(model, optimizer, range(1))
    assert all(torch.equal(value, start[key]) for key, value in whole(model).items())
    with pytest.raises(ValueError, match="learning_rate=-1"):
        set_learning_rate(optimizer, -1)


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ValueError, match="named_parameters"):
        optimizer_of(Weights().requires_grad_(False), "muon")


@pytest.mark.parametrize(
    "schedule, warmup_steps, total_steps, floor, expected",
    [
        ("constant", 0, 3, 0.0, [1, 1, 1, 1, 1, 1]),
        ("constant", 4, 4, 0.5, [0.25, 0.5, 0.75, 1, 1, 1]),
        ("cosine", 0, 4, 0.0, [1, 0.8535534, 0.5, 0.1464466, 0, 0]),
        ("cosine", 2, 5, 0.2, [0.5, 1, 0.8828427, 0.6, 0.3171573, 0.2]),
    ],
)
def test_schedule_numbers(schedule: str, warmup_steps: int, total_steps: int, floor: float, expected: list) -> None:
    rule = {"schedule": schedule, "warmup_steps": warmup_steps, "total_steps": total_steps, "floor": floor}
    assert [learning_rate_factor(step, **rule) for step in range(6)] == pytest.approx(expected, abs=1e-7)


@given(
    schedule=st.sampled_from(["constant", "cosine"]),
    steps=st.integers(1, 300).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))),
    floor=st.floats(0, 1),
)
@settings(deadline=None)
def test_schedule_rises_to_one_then_never_rises(schedule: str, steps: tuple[int, int], floor: float) -> None:
    warmup, total = steps
    rule = {"schedule": schedule, "warmup_steps": warmup, "total_steps": total, "floor": floor}
    factors = np.array([learning_rate_factor(step, **rule) for step in range(total + 3)])
    peak = max(warmup - 1, 0)
    assert factors[peak] == 1.0
    assert (np.diff(factors[: peak + 1]) > 0).all() and factors[0] > 0
    assert (np.diff(factors[peak:]) <= 0).all()
    assert (factors[peak:] >= floor).all() and (factors <= 1).all()
    assert factors[total] == (floor if schedule == "cosine" else 1.0)


@pytest.mark.parametrize(
    "key, value",
    [("step", -1), ("schedule", "linear"), ("total_steps", 0), ("warmup_steps", 11), ("warmup_steps", -1),
     ("floor", 1.5), ("floor", math.nan)],
)  # fmt: skip
def test_bad_schedules_are_named(key: str, value) -> None:
    rule = {"step": 0, "schedule": "cosine", "warmup_steps": 0, "total_steps": 10, key: value}
    with pytest.raises(ValueError, match=f"{key}={value!r}: must be"):
        learning_rate_factor(**rule)
