"""Pretrain the small policy: `python -m sage_ray.shapes.pretrain_policy OUT [--device cuda]`.

First the VAE on rendered clips, then the transformer by flow matching on their latents. The pretraining data are
imperfect the way web data are: captions that are wrong in an attribute, and clips with blur, fade, stall or wobble,
more often for some attributes than for others. The policy learns the mixture, so that it is recognisable and leaves
something to reinforcement learning. Held-out triples never occur. Writes a HunyuanVideo15Pipeline directory.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from torch import nn

from sage_ray.models.condition import condition_tensors
from sage_ray.models.hunyuan_video import HunyuanVideo, batched_vae
from sage_ray.models.packed_velocity import PackedVelocity, guided_velocity
from sage_ray.schedule import sigma_grid
from sage_ray.shapes.pipeline import Sizes, build_pipeline
from sage_ray.shapes.truth import judge
from sage_ray.shapes.world import SPECS, VALUES, Defects, caption, is_held_out, render

TRAIN_SPECS = [spec for spec in SPECS if not is_held_out(spec)]
WRONG_CAPTION = (0.03, 0.02, 0.05, 0.10, 0.05, 0.0)
"""Chance that the caption is wrong in size, colour, shape, direction, speed, background."""
WRONG_TRIANGLE = 0.08
"""Additional chance that a triangle's caption names another shape."""


def data_defects(specs: torch.Tensor, generator: torch.Generator) -> Defects:
    """Defects of pretraining clips; how often depends on the attributes.

    Blur strikes blue, purple and cyan shapes most, stall the quick ones, wobble the large ones.
    """
    device = generator.device

    def sometimes(chance: torch.Tensor, low: float, high: float) -> torch.Tensor:
        draw = torch.rand(2, len(specs), generator=generator, device=device)
        return torch.where(draw[0] < chance, low + (high - low) * draw[1], torch.zeros_like(draw[1]))

    cold = (specs[:, 1] == 2) | (specs[:, 1] == 4) | (specs[:, 1] == 5)
    return Defects(
        blur=sometimes(torch.where(cold, 0.5, 0.2), 1.5, 4.0),
        fade=sometimes(torch.full((len(specs),), 0.25, device=device), 0.2, 0.5),
        stall=sometimes(torch.where(specs[:, 4] == 1, 0.45, 0.15), 0.3, 0.6),
        wobble=sometimes(torch.where(specs[:, 0] == 1, 0.35, 0.15), 1.2, 2.8),
    )


def noisy_captions(specs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The specs that the captions claim, int64 [B, 6]: each attribute is wrong with its chance."""
    device, claimed = generator.device, specs.clone()
    for column, chance in enumerate(WRONG_CAPTION):
        chances = torch.full((len(specs),), chance, device=device)
        if column == 2:
            chances = chances + WRONG_TRIANGLE * (specs[:, 2] == 2)
        wrong = torch.rand(len(specs), generator=generator, device=device) < chances
        offset = torch.randint(1, len(VALUES[column]), (len(specs),), generator=generator, device=device)
        claimed[:, column] = torch.where(wrong, (specs[:, column] + offset) % len(VALUES[column]), specs[:, column])
    return claimed


def draw_clips(batch: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(specs [B, 6], clips [B, 3, F, H, W] in [-1, 1]) of the pretraining distribution."""
    table = torch.tensor(TRAIN_SPECS, device=generator.device)
    specs = table[torch.randint(len(table), (batch,), generator=generator, device=generator.device)]
    return specs, render(specs, data_defects(specs, generator), generator) * 2 - 1


class Timer:
    """Cosine learning rate over a time budget, so that the same command serves a slow and a fast machine."""

    def __init__(self, optimizer: torch.optim.Optimizer, minutes: float):
        self.optimizer, self.seconds, self.start = optimizer, max(60 * minutes, 1e-9), time.monotonic()
        self.base = [group["lr"] for group in optimizer.param_groups]

    def running(self) -> bool:
        """Set the learning rate; False once the time is over."""
        done = (time.monotonic() - self.start) / self.seconds
        factor = min(1.0, done / 0.02 + 0.02) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = base * factor
        return done < 1.0


def edge_error(decoded: torch.Tensor, video: torch.Tensor) -> torch.Tensor:
    """Mean absolute difference of the spatial gradients, which keeps edges sharp; clips [B, 3, F, H, W]."""
    across = decoded.diff(dim=-1) - video.diff(dim=-1)
    down = decoded.diff(dim=-2) - video.diff(dim=-2)
    return across.abs().mean() + down.abs().mean()


def train_vae(vae: nn.Module, minutes: float, batch: int, generator: torch.Generator, scale_clips: int = 1024) -> float:
    """Reconstruction, heavier on the shape than on the background, plus a small KL to the unit Gaussian.

    Without the weight the shape, a tenth of the pixels, stays unlearned for a long time.
    Sets the scaling factor to 1 / std of the latents of `scale_clips` clips. Returns the last PSNR in dB.
    """
    batched_vae(vae).train()
    optimizer = torch.optim.AdamW(vae.parameters(), 3e-3, betas=(0.9, 0.99), weight_decay=1e-4)
    timer, step, psnr = Timer(optimizer, minutes), 0, 0.0
    while timer.running():
        _, video = draw_clips(batch, generator)
        shape = (video - video[:, :, :, :1, :1]).abs().amax(1, keepdim=True) > 0.15
        weight = 1 + 6 * shape.float()
        posterior = vae.encode(video).latent_dist
        decoded = vae.decode(posterior.sample()).sample
        error = (decoded - video).square()
        loss = (error * weight).sum() / weight.sum() / 3 + 0.05 * edge_error(decoded, video)
        loss = loss + 1e-6 * posterior.kl().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 500 == 0:
            psnr = 10 * math.log10(4 / error.mean().item())
            print(f"vae step {step}: PSNR {psnr:.2f} dB", flush=True)
        step += 1
    vae.eval()
    with torch.no_grad():
        sizes = [min(256, scale_clips - done) for done in range(0, scale_clips, 256)]
        latents = torch.cat([vae.encode(draw_clips(size, generator)[1]).latent_dist.mean for size in sizes])
    vae.register_to_config(scaling_factor=1.0 / latents.std().item())
    return psnr


@torch.no_grad()
def encode_data(vae: nn.Module, num_clips: int, batch: int, generator: torch.Generator):
    """(specs [N, 6], scaled latents [N, C, F, H, W]) of `num_clips` pretraining clips."""
    specs, latents = [], []
    for _ in range(max(1, num_clips // batch)):
        spec, video = draw_clips(batch, generator)
        specs.append(spec)
        latents.append(vae.encode(video).latent_dist.mean * vae.config.scaling_factor)
    return torch.cat(specs), torch.cat(latents)


def zero_initialise(velocity: PackedVelocity) -> None:
    """Start every block as the identity and the output at zero (adaLN-zero)."""
    model = velocity.transformer
    layers = [model.norm_out.linear, model.proj_out]
    for block in model.transformer_blocks:
        layers += [block.norm1.linear, block.norm1_context.linear]
    for layer in layers:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


def train_policy(model: HunyuanVideo, minutes: float, batch: int, num_clips: int, generator: torch.Generator) -> None:
    """Flow matching v = z - x0 with logit-normal sigma, captions as noisy as the data; leaves EMA weights."""
    velocity, device = model.velocity, generator.device
    specs, latents = encode_data(model.vae, num_clips, batch, generator)
    text = condition_tensors([model.encode_prompt(caption(s)) for s in SPECS], device).text
    index_of = {spec: i for i, spec in enumerate(SPECS)}
    strides = torch.tensor([index_of[tuple(int(k == c) for k in range(6))] for c in range(6)], device=device)
    empty, byt5, _, _ = condition_tensors([model.encode_prompt("")], device)
    velocity.train().requires_grad_(True)
    PackedVelocity(velocity.transformer)
    zero_initialise(velocity)
    trainable = [p for p in velocity.parameters() if p.requires_grad]
    average = [p.detach().clone() for p in trainable]
    optimizer = torch.optim.AdamW(trainable, 1.5e-3, betas=(0.9, 0.98), weight_decay=1e-3)
    timer, step = Timer(optimizer, minutes), 0
    while timer.running():
        rows = torch.randint(len(latents), (batch,), generator=generator, device=device)
        clean = latents[rows]
        claimed = (noisy_captions(specs[rows], generator) * strides).sum(1)
        condition = empty if step % 10 == 9 else text[claimed]
        noise = torch.randn(clean.shape, generator=generator, device=device)
        sigma = torch.sigmoid(torch.randn(batch, generator=generator, device=device))
        sigma = 2.5 * sigma / (1 + 1.5 * sigma)
        mix = sigma[:, None, None, None, None]
        predicted = velocity((1 - mix) * clean + mix * noise, sigma * 1000, condition, byt5)
        loss = (predicted - (noise - clean)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        torch._foreach_lerp_(average, [p.detach() for p in trainable], 1 - min(0.9995, (1 + step) / (10 + step)))
        if step % 500 == 0:
            print(f"policy step {step}: loss {loss.item():.4f}", flush=True)
        step += 1
    with torch.no_grad():
        for parameter, smooth in zip(trainable, average, strict=True):
            parameter.copy_(smooth)
    velocity.eval().requires_grad_(False)


@torch.no_grad()
def sample_ode(model: HunyuanVideo, prompt: str, noise: torch.Tensor, num_steps: int, shift: float) -> torch.Tensor:
    """Frames uint8 [B, T, H, W, 3] by the Euler method, without guidance."""
    latents, sigmas = noise, sigma_grid(num_steps, shift)
    condition = condition_tensors([model.encode_prompt(prompt)], noise.device)
    for sigma, sigma_next in zip(sigmas[:-1], sigmas[1:], strict=True):
        latents = latents + float(sigma_next - sigma) * guided_velocity(
            model.velocity, latents, [float(sigma)], condition, None, 1.0
        )
    return model.decode(latents)


def report(model: HunyuanVideo, shift: float, generator: torch.Generator) -> list[tuple[str, torch.Tensor]]:
    """Print truth of VAE reconstructions and of samples; returns (caption, frames) of some samples."""
    specs, video = draw_clips(256, generator)
    latents = model.vae.encode(video).latent_dist.mean
    mse = (model.vae.decode(latents).sample - video).square().mean(dim=(1, 2, 3, 4))
    print(f"vae: PSNR {10 * math.log10(4 / mse.mean().item()):.2f} dB", flush=True)
    scale, shown = model.vae.config.scaling_factor, []
    prompts = [caption(tuple(spec)) for spec in specs.tolist()]
    truth_in = judge(((video / 2 + 0.5) * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1), prompts)
    truth_out = judge(model.decode(latents * scale).to(video.device), prompts)
    for name in ("vq", "mq", "ta"):
        a, b = getattr(truth_in, name), getattr(truth_out, name)
        print(
            f"vae: truth {name} rendered {a.mean():.3f} decoded {b.mean():.3f} correlation "
            f"{torch.corrcoef(torch.stack([a, b]))[0, 1]:.3f}"
        )
    for title, held_out in (("training", False), ("held-out", True)):
        chosen = [spec for spec in SPECS if is_held_out(spec) == held_out][::11][:48]
        scores, found = [], []
        for spec in chosen:
            noise = torch.randn(8, *latents.shape[1:], generator=generator, device=generator.device)
            frames = sample_ode(model, caption(spec), noise, 20, shift)
            truth = judge(frames, [caption(spec)] * 8)
            scores.append(torch.stack([truth.vq, truth.mq, truth.ta, truth.matches.float()], 1))
            found.append(truth.attributes)
            shown.append((caption(spec), frames[0]))
        table, attributes = torch.cat(scores), torch.cat(found).mean(0)
        print(
            f"{title} samples: vq mq ta match {table.mean(0).tolist()} std {table.std(0).tolist()} "
            f"attributes {attributes.tolist()}",
            flush=True,
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--vae", type=Path, help="folder of a trained VAE to go on from")
    parser.add_argument("--vae-minutes", type=float, default=4.0)
    parser.add_argument("--vae-batch", type=int, default=64)
    parser.add_argument("--policy-minutes", type=float, default=3.5)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--clips", type=int, default=131072)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    generator = torch.Generator(arguments.device).manual_seed(arguments.seed)
    sizes = Sizes()
    model = HunyuanVideo(build_pipeline(sizes, arguments.seed), torch.float32, arguments.device)
    if arguments.vae:
        model.vae.load_state_dict(AutoencoderKLHunyuanVideo15.from_pretrained(arguments.vae).state_dict())
    model.vae.requires_grad_(True)
    train_vae(model.vae, arguments.vae_minutes, arguments.vae_batch, generator)
    model.vae.requires_grad_(False)
    model.vae.save_pretrained(arguments.out / "vae")
    train_policy(model, arguments.policy_minutes, arguments.batch, arguments.clips, generator)
    with torch.no_grad():
        model.pipeline.to(torch.bfloat16)
        model.pipeline.save_pretrained(arguments.out, safe_serialization=True)
        report(HunyuanVideo.load(arguments.out, device=arguments.device), sizes.shift, generator)


if __name__ == "__main__":
    main()
