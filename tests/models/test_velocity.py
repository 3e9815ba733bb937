"""The packed forward against diffusers' own, and what rollout and learner must share."""

import copy

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel

from sage_ray.models.condition import condition_tensors
from sage_ray.models.packed_velocity import guided_velocity
from sage_ray.schedule import timestep
from tests.conftest import POLICY
from tests.small import load_velocity

PROMPTS = ("a small red circle moves left slowly on a gray background", "a red circle")


@pytest.fixture(scope="module")
def stock() -> HunyuanVideo15Transformer3DModel:
    return HunyuanVideo15Transformer3DModel.from_pretrained(POLICY / "transformer", torch_dtype=torch.float32).eval()


def latents(policy, batch: int) -> torch.Tensor:
    shape = policy.latent_shape(9, 32, 32)
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(1))


def stock_velocity(stock, x: torch.Tensor, sigma: float, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    config, batch = stock.config, len(x)
    zeros = torch.zeros(batch, config.in_channels - x.shape[1], *x.shape[2:])
    with torch.no_grad():
        return stock(
            hidden_states=torch.cat([x, zeros], 1),
            timestep=torch.full((batch,), timestep(sigma)),
            encoder_hidden_states=text,
            encoder_attention_mask=mask,
            encoder_hidden_states_2=torch.zeros(batch, 3, config.text_embed_2_dim),
            encoder_attention_mask_2=torch.zeros(batch, 3),
            image_embeds=torch.zeros(batch, 4, config.image_embed_dim),
            return_dict=False,
        )[0]


def test_packed_forward_equals_diffusers(policy, stock) -> None:
    x = latents(policy, 3)
    condition = condition_tensors([policy.encode_prompt(PROMPTS[0])], "cpu")
    text = condition[0].expand(3, -1, -1)
    padded = torch.cat([text, torch.randn(3, 5, text.shape[2])], 1)
    mask = torch.cat([torch.ones(3, text.shape[1]), torch.zeros(3, 5)], 1)
    with torch.no_grad():
        ours = guided_velocity(policy.velocity, x, [0.7], condition, None, 1.0)
    theirs = stock_velocity(stock, x, 0.7, padded, mask)
    assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max()


def test_two_prompts_of_unequal_length_equal_two_single_runs(policy) -> None:
    x = latents(policy, 2)
    texts = [condition_tensors([policy.encode_prompt(p)], "cpu")[0] for p in PROMPTS]
    assert texts[0].shape[1] != texts[1].shape[1]
    longest = max(t.shape[1] for t in texts)
    joint = torch.cat([torch.nn.functional.pad(t, (0, 0, 0, longest - t.shape[1])) for t in texts])
    mask = torch.stack([torch.arange(longest) < t.shape[1] for t in texts])
    empty = torch.zeros(2, 0, 16)
    with torch.no_grad():
        together = policy.velocity(x, torch.tensor([600.0]).expand(2), joint, empty, mask)
        alone = [policy.velocity(x[i : i + 1], torch.tensor([600.0]), texts[i], empty[:1]) for i in range(2)]
    assert (together - torch.cat(alone)).abs().max() < 1e-5


def test_guidance_is_u_plus_scale_times_difference(policy) -> None:
    x = latents(policy, 2)
    condition = condition_tensors([policy.encode_prompt(PROMPTS[0])], "cpu")
    negative = condition_tensors([policy.encode_prompt("")], "cpu")
    with torch.no_grad():
        c = guided_velocity(policy.velocity, x, [0.5], condition, None, 1.0)
        u = guided_velocity(policy.velocity, x, [0.5], negative, None, 1.0)
        guided = guided_velocity(policy.velocity, x, [0.5], condition, negative, 3.0)
    assert torch.equal(guided, u + 3.0 * (c - u))
    assert (c - u).abs().max() > 1e-3


def test_timesteps_are_float32_under_bfloat16(policy) -> None:
    """937.5 and 936 are one bfloat16 number; the velocity must still tell them apart."""
    model = copy.deepcopy(policy.velocity).to(torch.bfloat16)
    model.dtype = torch.bfloat16
    assert torch.tensor(937.5).bfloat16() == torch.tensor(936.5).bfloat16()
    condition = condition_tensors([policy.encode_prompt(PROMPTS[0])], "cpu")
    x = latents(policy, 1)
    with torch.no_grad():
        a, b = (guided_velocity(model, x, [sigma], condition, None, 1.0) for sigma in (0.9375, 0.9365))
    assert not torch.equal(a, b)


def test_unused_parameters_are_frozen_and_the_rest_gets_gradient(policy) -> None:
    model = load_velocity(POLICY, torch.float32, "cpu")
    condition = condition_tensors([policy.encode_prompt(PROMPTS[0])], "cpu")
    guided_velocity(model, latents(policy, 2), [0.5], condition, None, 1.0).square().mean().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.any(), name


def test_gradient_checkpointing_changes_nothing(policy) -> None:
    condition = condition_tensors([policy.encode_prompt(PROMPTS[0])], "cpu")
    gradients = []
    for checkpointing in (False, True):
        model = load_velocity(POLICY, torch.float32, "cpu")
        model.transformer.gradient_checkpointing = checkpointing
        guided_velocity(model, latents(policy, 2), [0.5], condition, None, 1.0).square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_decode_divides_by_the_scaling_factor_once(policy) -> None:
    z = latents(policy, 2)
    factor = policy.vae.config.scaling_factor
    assert abs(factor - 1) > 0.05
    with torch.no_grad():
        video = policy.vae.decode(z / factor).sample
    expected = ((video / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1)
    assert torch.equal(policy.decode(z), expected)


def test_batched_decode_equals_one_at_a_time(policy) -> None:
    z = latents(policy, 3)
    together, alone = policy.decode(z), torch.cat([policy.decode(z[i : i + 1]) for i in range(3)])
    assert (together.int() - alone.int()).abs().max() <= 1


SIZES = [((9, 32, 30), "width"), ((9, 20, 32), "height"), ((8, 32, 32), "num_frames")]


@pytest.mark.parametrize(("size", "key"), SIZES)
def test_sizes_that_do_not_fit_the_vae_are_named(policy, size: tuple[int, int, int], key: str) -> None:
    with pytest.raises(ValueError, match=rf"sampling\.{key}"):
        policy.latent_shape(*size)


def test_text_of_every_row_goes_with_one_byt5_row(policy) -> None:
    x = latents(policy, 2)
    texts = (PROMPTS[0], PROMPTS[0].replace("red", "blue"))
    conditions = [condition_tensors([policy.encode_prompt(text)], "cpu") for text in texts]
    time = torch.tensor([700.0])
    with torch.no_grad():
        together = policy.velocity(x, time, torch.cat([c.text for c in conditions]), conditions[0].byt5)
        alone = torch.cat([policy.velocity(x[i : i + 1], time, *conditions[i]) for i in range(2)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_loading_leaves_nothing_on_the_meta_device_and_every_buffer_is_the_stock_model_s(stock) -> None:
    """A parameter or buffer that was never filled would hold noise, or nothing at all."""
    loaded = load_velocity(POLICY, torch.float32, "cpu").transformer
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(loaded, kind)()), dict(getattr(stock, kind)())
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert not value.is_meta and torch.equal(value, theirs[name]), name
