"""Adapters: the base stays as it is, learner and worker compute the same bits, files load where users load them."""

import copy
import hashlib

import pytest
import torch
import torch.distributed as dist
from diffusers import HunyuanVideo15Pipeline
from torch.distributed.fsdp import FSDPModule

from sage_ray.models.lora import (
    FILE,
    adapted_layers,
    adapter_state,
    add_lora,
    load_adapter,
    merged_state,
    save_adapter,
)
from sage_ray.models.packed_velocity import PackedVelocity
from sage_ray.models.prompt_encoder import align
from sage_ray.parallel import free_port, reshard, shard, start_process_group
from sage_ray.weights import pack, unpack
from tests.conftest import POLICY
from tests.small import load_velocity

BF16, FP32 = torch.bfloat16, torch.float32
REFINER = "context_embedder.token_refiner.refiner_blocks.0."


def base(dtype: torch.dtype = FP32) -> PackedVelocity:
    velocity = load_velocity(POLICY, dtype, "cpu")
    velocity.transformer.to(dtype)
    return velocity


def adapted(rank=4, alpha=6.0, targets=None, seed=0, dtype=FP32, adapter_dtype=FP32, trained=True) -> PackedVelocity:
    """The shipped policy with adapters as a learner or worker makes them; B random when `trained`."""
    transformer = base(dtype).transformer
    add_lora(transformer, rank=rank, alpha=alpha, targets=targets, seed=seed, dtype=adapter_dtype)
    velocity = PackedVelocity(transformer, dtype)
    if trained:
        generator = torch.Generator().manual_seed(99)
        for layer in adapted_layers(transformer).values():
            b = layer.lora_B["default"].weight
            b.data.copy_(0.1 * torch.randn(b.shape, generator=generator))
    return velocity


def inputs(seed: int = 1) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(2, 8, 2, 4, 4, generator=generator)
    text = torch.randn(1, 7, 64, generator=generator)
    return latents, torch.tensor([700.0]), text, torch.zeros(1, 0, 16)


def output(model: torch.nn.Module, seed: int = 1) -> torch.Tensor:
    with torch.no_grad():
        return model(*inputs(seed))


def base_hash(velocity: PackedVelocity) -> str:
    digest = hashlib.blake2b()
    for name, parameter in velocity.named_parameters():
        if ".lora_" not in name:
            digest.update(parameter.detach().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_version_zero_is_bitwise_the_base_and_b_changes_it(dtype) -> None:
    expected = output(base(dtype))
    assert torch.equal(output(adapted(dtype=dtype, adapter_dtype=dtype, trained=False)), expected)
    assert (output(adapted(dtype=dtype, adapter_dtype=dtype)) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("rank", [1, 4])
def test_a_frozen_worker_computes_the_same_bits(rank) -> None:
    """torch takes mm or bmm by the weight's requires_grad flag where an input is a slice, as after the attention."""
    velocity = adapted(rank=rank)
    expected = velocity(*inputs()).detach()
    assert torch.equal(output(velocity), expected)
    assert torch.equal(output(velocity.requires_grad_(False)), expected)


def test_only_adapters_train_and_their_number_is_the_formulas() -> None:
    """r (in + out) summed: 50 d r per block, less 14 d r for what the last block does not use; d = 64, 4 blocks."""
    rank, d = 4, 64
    velocity = base()
    names = add_lora(velocity.transformer, rank=rank, alpha=8, targets=None, seed=0)
    trainable = {n: p for n, p in velocity.transformer.named_parameters() if p.requires_grad}
    assert list(trainable) == names
    assert all(".lora_A." in n or ".lora_B." in n for n in names)
    assert sum(p.numel() for p in trainable.values()) == rank * d * (4 * 50 - 14)
    assert PackedVelocity(velocity.transformer).trainable_names == {f"transformer.{n}" for n in names}


def test_every_adapter_gets_a_gradient_with_and_without_checkpointing() -> None:
    """No input requires a gradient: a reentrant checkpoint would give none."""
    gradients = []
    for checkpointing in (False, True):
        velocity = adapted()
        velocity.transformer.gradient_checkpointing = checkpointing
        velocity(*inputs()).square().mean().backward()
        gradients.append({n: p.grad for n, p in velocity.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        assert gradient is not None and gradient.abs().max() > 0, name
        assert torch.equal(gradient, gradients[1][name]), name


def test_a_comes_from_the_seed_alone_and_the_global_state_is_left() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = adapter_state(adapted(trained=False).transformer)
    torch.manual_seed(4)
    second, other = (adapter_state(adapted(trained=False, seed=seed).transformer) for seed in (0, 1))
    rounded = adapter_state(adapted(trained=False, dtype=BF16, adapter_dtype=BF16).transformer)
    torch.manual_seed(3)
    velocity = base()
    torch.manual_seed(3)
    add_lora(velocity.transformer, rank=2, alpha=1, targets=["to_q"], seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    for key, value in first.items():
        assert torch.equal(value, second[key]) and torch.equal(value.to(BF16), rounded[key])
        if ".lora_A." in key:
            assert not torch.equal(value, other[key])
            assert value.abs().max() <= value.shape[1] ** -0.5
        else:
            assert not value.any()


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (["to_q"], 5),  # four blocks and the refiner's
        (["add_q_proj", "ff_context.net.2"], 6),  # not the last block's
        (["norm_out.linear", "proj_out"], 2),
        (["transformer_blocks.1.attn.to_k"], 1),
    ],
)
def test_targets_are_whole_dotted_parts(targets, count) -> None:
    assert len(adapted_layers(adapted(targets=targets).transformer)) == count


@pytest.mark.parametrize("name", ["norm_out.linear", REFINER + "norm_out.linear"])
def test_a_full_name_adapts_that_layer_only(name) -> None:
    """The output norm's full name is also the end of a refiner's."""
    assert list(adapted_layers(adapted(targets=[name]).transformer)) == [name]


@pytest.mark.parametrize("target", ["to_query", "o_q", "image_embedder.linear_1", "x_embedder.proj", "linear_3"])
def test_unknown_or_unused_targets_are_refused(target) -> None:
    with pytest.raises(ValueError, match=rf"target '{target}' .*there are .*attn.to_q, .*ff.net.2"):
        adapted(targets=["to_q", target])


def test_bad_numbers_no_targets_and_a_second_adapter_are_refused() -> None:
    with pytest.raises(ValueError, match="rank 0"):
        adapted(rank=0)
    with pytest.raises(ValueError, match="alpha 0"):
        adapted(alpha=0)
    with pytest.raises(ValueError, match="targets is empty"):
        adapted(targets=[])
    with pytest.raises(ValueError, match="no adapter"):
        merged_state(base().transformer)
    with pytest.raises(ValueError, match="already"):
        add_lora(adapted().transformer, rank=1, alpha=1, targets=None, seed=0)


@pytest.mark.parametrize(("dtype", "limit"), [(FP32, 1e-5), (BF16, 3e-2)])
def test_fifty_merges_leave_the_base_and_give_the_adapters_output(dtype, limit) -> None:
    """PEFT's own merge and unmerge, fifty times, do not give the base back."""
    velocity = adapted(dtype=dtype, adapter_dtype=dtype)
    before, expected, peft = base_hash(velocity), output(velocity), copy.deepcopy(velocity)
    for _ in range(50):
        state = merged_state(velocity.transformer)
    assert base_hash(velocity) == before
    plain = base(dtype)
    plain.transformer.load_state_dict(state, strict=True)
    assert list(state) == [name for name, _ in plain.transformer.named_parameters()]
    assert (output(plain) - expected).abs().max() <= limit * expected.abs().max()
    for layer in adapted_layers(peft.transformer).values():
        for _ in range(50):
            layer.merge()
            layer.unmerge()
    assert base_hash(peft) != before


def test_merged_weights_are_rounded_once() -> None:
    velocity = adapted(dtype=BF16)
    layer = adapted_layers(velocity.transformer)["transformer_blocks.0.attn.to_q"]
    delta = 6.0 / 4 * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight)
    expected = (layer.base_layer.weight.float() + delta).to(BF16)
    assert torch.equal(merged_state(velocity.transformer)["transformer_blocks.0.attn.to_q.weight"], expected)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_files_round_trip_bitwise(tmp_path, dtype) -> None:
    saved, loaded = adapted(dtype=dtype, adapter_dtype=dtype), adapted(dtype=dtype, adapter_dtype=dtype, seed=8)
    addresses = [p.data_ptr() for p in loaded.parameters()]
    for _ in range(2):  # over an earlier file too
        save_adapter(saved.transformer, tmp_path / "new" / "adapter")
    load_adapter(loaded.transformer, tmp_path / "new" / "adapter")
    assert [path.name for path in (tmp_path / "new" / "adapter").iterdir()] == [FILE]
    assert torch.equal(output(saved), output(loaded))
    assert addresses == [p.data_ptr() for p in loaded.parameters()]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"rank": 2}, r"norm1\.linear\.lora_A\.weight is \(4, 64\), the model has \(2, 64\)"),
        ({"alpha": 5.0}, "transformer.lora_alpha is 6.0, the model has 5.0"),
        ({"targets": ["to_v"]}, r"refiner_blocks\.0\.attn\.to_v\.lora_A\.weight is only in the model"),
        ({"targets": ["transformer_blocks.0.attn.to_v"]}, r"attn\.add_k_proj\.lora_A\.weight is only in the file"),
    ],
)
def test_a_file_of_other_adapters_is_refused_and_changes_nothing(tmp_path, other, message) -> None:
    save_adapter(adapted().transformer, tmp_path)
    model = adapted(**other, seed=4)
    before = output(model)
    with pytest.raises(ValueError, match=message):
        load_adapter(model.transformer, tmp_path)
    assert torch.equal(output(model), before)


def test_a_user_loads_the_file_into_diffusers(tmp_path, caplog) -> None:
    """Rank and alpha come from the file; also for a layer whose name ends another's."""
    for index, targets in enumerate((None, ["norm_out.linear"])):
        velocity = adapted(targets=targets)
        save_adapter(velocity.transformer, tmp_path / str(index))
        pipeline = HunyuanVideo15Pipeline.from_pretrained(POLICY, torch_dtype=FP32)
        caplog.clear()
        pipeline.transformer.load_lora_adapter(tmp_path / str(index), weight_name=FILE)
        assert not [r for r in caplog.records if "adapter" in r.message]
        align(pipeline.transformer)
        expected = output(velocity)
        assert (output(PackedVelocity(pipeline.transformer)) - expected).abs().max() <= 1e-5 * expected.abs().max()
        ours, theirs = adapted_layers(velocity.transformer), adapted_layers(pipeline.transformer)
        assert list(theirs) == list(ours)
        for name, layer in theirs.items():
            (adapter,) = layer.lora_A
            assert layer.scaling[adapter] == 6.0 / 4
            assert torch.equal(layer.lora_A[adapter].weight, ours[name].lora_A["default"].weight)


def sharded_agree(rank: int, world: int) -> None:
    """Gradients in float32, then bits in bfloat16 before and after a step. LoRA rank 3: unequal shards of A."""
    plain, model = adapted(rank=3), adapted(rank=3)
    model.transformer.gradient_checkpointing = True
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    shard(model, world, "cpu")
    for index in range(world):
        (plain(*inputs(index)).square().mean() / world).backward()
    model(*inputs(rank)).square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) == (not theirs.requires_grad), name
        if ours.grad is not None:
            assert (ours.grad.full_tensor() - theirs.grad).abs().max() <= 1e-6 * theirs.grad.abs().max() + 1e-9, name

    learner, worker = adapted(rank=3, dtype=BF16), adapted(rank=3, dtype=BF16, adapter_dtype=BF16)
    unsharded = adapted(rank=3, dtype=BF16)
    worker.requires_grad_(False)
    learner.transformer.gradient_checkpointing = True
    shard(learner, world, "cpu")
    optimizer = torch.optim.AdamW([p for p in learner.parameters() if p.requires_grad], 1e-2)
    learner_output = learner(*inputs(rank))
    assert torch.equal(learner_output.detach(), output(worker, rank))
    assert not torch.equal(output(unsharded, rank), output(worker, rank))  # why a learner must be sharded
    learner_output.square().mean().backward()
    reshard(learner)
    merged = merged_state(unsharded.transformer)
    for key, value in merged_state(learner.transformer).items():
        assert torch.equal(value, merged[key]), key
    optimizer.step()
    assert {p.dtype for p in optimizer.param_groups[0]["params"]} == {FP32}
    parts = [None] * world
    dist.all_gather_object(parts, pack(learner, 1, rank, BF16))
    unpack(worker, parts, worker.trainable_names)
    assert torch.equal(output(learner, rank), output(worker, rank))
    reshard(learner)
    for key, value in adapter_state(learner.transformer).items():
        assert value.dtype == FP32 and torch.equal(value.to(BF16), adapter_state(worker.transformer)[key]), key
    assert isinstance(learner.transformer.transformer_blocks[0], FSDPModule)


def run_rank(rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    start_process_group(rank, world, "127.0.0.1", port, device="cpu", timeout_s=60)
    try:
        sharded_agree(rank, world)
    finally:
        dist.destroy_process_group()


def test_one_rank_agrees_with_a_plain_worker() -> None:
    run_rank(0, 1, free_port())


def test_two_ranks_agree_with_a_plain_worker() -> None:
    torch.multiprocessing.spawn(run_rank, (2, free_port()), nprocs=2)
