"""A block in pieces: recomputed, compiled, sharded and with adapters, it is the same block."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.utils import counters

from sage_ray.config import LoraConfig
from sage_ray.models.attention import CPU, PackedAttention, best_kernel, masked
from sage_ray.models.lora import adapt
from sage_ray.models.packed_block import BlockPieces, compiled_pieces, use_pieces
from sage_ray.models.packed_velocity import PackedVelocity
from sage_ray.models.stock_velocity import StockVelocity
from sage_ray.models.streamed import load_transformer
from sage_ray.parallel import free_port, shard, start_process_group
from tests.conftest import POLICY
from tests.small import load_velocity

Gradients = dict[str, torch.Tensor]


def model_with(pieces: BlockPieces, recompute: bool = False, lora: int = 0, targets=None) -> PackedVelocity:
    model = load_velocity(POLICY, torch.float32, "cpu")
    if lora:
        adapt(model, LoraConfig(rank=lora, targets=targets), 0, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    for block in model.transformer.transformer_blocks:
        use_pieces(block, pieces)
    model.transformer.gradient_checkpointing = recompute
    return model


def inputs(model: PackedVelocity, *lengths: int, size: tuple[int, int, int] = (3, 4, 4)) -> tuple:
    """Latents of four videos of F x H x W, times, texts of the given lengths, byT5, masks."""
    config, generator, longest = model.transformer.config, torch.Generator().manual_seed(3), max(lengths)
    latents = torch.randn(4, config.out_channels, *size, generator=generator)
    text = torch.randn(len(lengths), longest, config.text_embed_dim, generator=generator)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    times = torch.linspace(400, 900, len(lengths))
    empty = torch.zeros(len(lengths), 0, config.text_embed_2_dim)
    return latents, times, text, empty, None if mask.all() else mask


def run(model: PackedVelocity, *lengths: int) -> tuple[torch.Tensor, Gradients]:
    """Velocity and gradients of a scalar of it."""
    model.zero_grad()
    velocity = model(*inputs(model, *lengths))
    velocity.square().mean().backward()
    return velocity.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(ours: Gradients, theirs: Gradients) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() <= 1e-6 + 1e-5 * gradient.abs().max(), name


TARGETS = [["add_q_proj"], ["transformer_blocks.2.attn.to_q"], ["ff_context.net.2"], ["norm1.linear"], ["to_q", "to_v"]]
"""With some, blocks or queries, keys and values need no gradient."""


@pytest.mark.parametrize("keep_attention", [True, False])
@pytest.mark.parametrize(
    ("lengths", "lora", "targets"),
    [((7,), 0, None), ((7, 5), 0, None), ((7,), 4, None), ((7, 5), 4, None), *(((7,), 4, some) for some in TARGETS)],
)
def test_recomputation_changes_no_bit(keep_attention: bool, lengths: tuple[int, ...], lora: int, targets) -> None:
    velocity, gradients = run(model_with(BlockPieces(), lora=lora, targets=targets), *lengths)
    pieces = BlockPieces(keep_attention=keep_attention)
    recomputed = run(model_with(pieces, recompute=True, lora=lora, targets=targets), *lengths)
    assert torch.equal(recomputed[0], velocity)
    assert recomputed[1].keys() == gradients.keys()
    assert all(torch.equal(recomputed[1][name], gradient) for name, gradient in gradients.items())


def test_what_is_kept_is_small() -> None:
    """Beside its inputs a recomputed block keeps attention's output, or not even that; never queries or activations."""

    def saved_bytes(pieces: BlockPieces, recompute: bool) -> int:
        seen: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                seen[tensor.data_ptr()] = tensor.nbytes
            return tensor

        model = model_with(pieces, recompute)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            velocity = model(*inputs(model, 7))
        node, kept = velocity.grad_fn, 0
        queue, visited = [node], set()
        while queue:
            node = queue.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            kept += node.kept[0].nbytes if getattr(node, "kept", None) else 0
            queue += [parent for parent, _ in node.next_functions]
        return sum(seen.values()) + kept

    everything = saved_bytes(BlockPieces(), False)
    with_attention, without = (saved_bytes(BlockPieces(keep_attention=keep), True) for keep in (True, False))
    assert without < with_attention < everything / 3
    config = load_velocity(POLICY, torch.float32, "cpu").transformer.config
    width = config.num_attention_heads * config.attention_head_dim
    tokens = 3 * (4 // config.patch_size) ** 2 + 7
    assert with_attention - without == config.num_layers * 4 * tokens * width * 4  # 4 videos, 4 bytes


@pytest.fixture
def compiled() -> Iterator[BlockPieces]:
    torch._dynamo.reset()
    counters.clear()
    yield compiled_pieces(True, backend="aot_eager")
    torch._dynamo.reset()


def test_compiled_pieces_give_the_same_for_every_length_of_text(compiled: BlockPieces) -> None:
    plain, ours = model_with(BlockPieces()), model_with(compiled, recompute=True)
    graphs = []
    for length in (7, 12, 3):
        velocity, gradients = run(plain, length)
        again, same = run(ours, length)
        torch.testing.assert_close(again, velocity, rtol=0, atol=1e-6)
        assert_close(same, gradients)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [8, 8, 8]  # two pieces, with and without gradient, the last block apart


def rounding(graph: torch.fx.GraphModule, _: list):
    """A compiler whose code rounds differently under gradient."""
    error = 1e-3 if torch.is_grad_enabled() else 0.0
    return lambda *inputs: tuple(x + error for x in graph(*inputs))


def test_a_learner_scores_as_a_rollout_does() -> None:
    """Bit for bit, although compiled pieces round differently under gradient: the forward runs without."""
    torch._dynamo.reset()
    pieces = compiled_pieces(True, backend=rounding)
    learner, worker = model_with(pieces, recompute=True), model_with(pieces).requires_grad_(False)
    with torch.no_grad():
        rollout = worker(*inputs(worker, 7))
    assert torch.equal(learner(*inputs(learner, 7)).detach(), rollout)
    learner.transformer.gradient_checkpointing = False
    assert not torch.equal(learner(*inputs(learner, 7)).detach(), rollout)
    torch._dynamo.reset()


def test_other_batches_and_threads_compile_their_own(compiled: BlockPieces) -> None:
    """What was compiled before changes nothing, and no thread falls back to pieces as they are written."""
    model = model_with(compiled).requires_grad_(False)

    def graphs_of(videos: int, length: int) -> int:
        latents, *rest = inputs(model, length)
        before = counters["stats"]["unique_graphs"]
        with torch.no_grad():
            model(latents[:1].repeat(videos, 1, 1, 1, 1), *rest)
        return counters["stats"]["unique_graphs"] - before

    with ThreadPoolExecutor(1) as pool:
        new = [pool.submit(graphs_of, videos, length).result() for videos in range(2, 13) for length in (7, 12)]
    assert new == [2, 0] * 11


def test_the_processor_is_diffusers_own_attention() -> None:
    """Prompts of unequal length in one batch, at their valid tokens; padded text is attended by nobody."""
    block = load_transformer(POLICY / "transformer", torch.float32, "cpu").transformer_blocks[0]
    generator, width = torch.Generator().manual_seed(1), block.attn.to_q.in_features
    video, text = (torch.randn(2, n, width, generator=generator) for n in (12, 7))
    angles = torch.rand(12, width // block.attn.heads, generator=generator)
    mask = torch.arange(7) < torch.tensor([7, 4])[:, None]
    arguments = video, text, mask, (angles.cos(), angles.sin())
    with torch.no_grad():
        theirs = block.attn(*arguments[:2], attention_mask=mask, image_rotary_emb=arguments[3])
        ours = PackedAttention()(block.attn, *arguments)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(ours[1][mask], theirs[1][mask], rtol=0, atol=1e-5)


def test_compiled_pieces_take_adapters(compiled: BlockPieces) -> None:
    velocity, gradients = run(model_with(BlockPieces(), lora=4), 7)
    again, same = run(model_with(compiled, recompute=True, lora=4), 7)
    torch.testing.assert_close(again, velocity, rtol=0, atol=1e-6)
    assert_close(same, gradients)


def test_a_sharded_compiled_recomputed_model_has_the_gradients_of_a_plain_one(compiled: BlockPieces) -> None:
    velocity, gradients = run(model_with(BlockPieces()), 7)
    start_process_group(0, 1, "127.0.0.1", free_port(), device="cpu", timeout_s=60)
    try:
        again, same = run(shard(model_with(compiled, recompute=True), 1, "cpu"), 7)
        whole = {name: gradient.full_tensor() for name, gradient in same.items()}
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(again, velocity)
    assert_close(whole, gradients)


@pytest.mark.parametrize("masked_out", [0, 3])
def test_a_kernel_s_backward_is_autograd_s(masked_out: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value, gradient = (torch.randn(2, 3, 11, 16, generator=generator) for _ in range(4))
    mask = None if not masked_out else (torch.arange(11) < 11 - masked_out)[None, None, None]
    kernel = best_kernel(query, mask)
    assert kernel is CPU if mask is None else kernel.name == masked(mask).name
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    weights = torch.einsum("bhqd,bhkd->bhqk", leaves[0], leaves[1]) / 4
    weights = weights if mask is None else weights.masked_fill(~mask, -torch.inf)
    plain = weights.softmax(-1) @ leaves[2]
    attended = kernel.forward(query, key, value)
    torch.testing.assert_close(attended.output, plain)
    ours = kernel.backward(gradient, query, key, value, attended)
    for a, b in zip(ours, torch.autograd.grad(plain, leaves, gradient), strict=True):
        torch.testing.assert_close(a, b)


def test_the_stock_forward_is_the_same_velocity() -> None:
    ours = load_velocity(POLICY, torch.float32, "cpu")
    stock = StockVelocity(load_transformer(POLICY / "transformer", torch.float32, "cpu"))
    stock.transformer.gradient_checkpointing = True
    for lengths in ((7,), (7, 4)):
        (velocity, gradients), (theirs, stock_gradients) = run(ours, *lengths), run(stock, *lengths)
        assert (velocity - theirs).abs().max() <= 2e-5 * theirs.abs().max()
        assert set(gradients) <= set(stock_gradients)
    with pytest.raises(ValueError, match="1001 tokens does not fit the 1000"):
        stock(*inputs(stock, 1001))
