"""Train the small VideoAlign: `python -m sage_ray.shapes.pretrain_reward OUT --policy assets/shapes/policy`.

It regresses the truth of rendered clips (with graded defects, raw and through the policy's VAE) and of the policy's
own samples, against captions of which half are wrong in one to three attributes. Writes a VideoAlign folder whose
normalisation makes every axis zero-mean and unit-std over the base policy's samples.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from torch import nn

from sage_ray.models.hunyuan_video import HunyuanVideo, batched_vae, scheduler_shift
from sage_ray.rewards.videoalign import VideoAlign
from sage_ray.shapes.pretrain_policy import TRAIN_SPECS, Timer, sample_ode
from sage_ray.shapes.reward_folder import new_model, write_reward
from sage_ray.shapes.truth import judge
from sage_ray.shapes.world import FPS, SPECS, VALUES, Defects, caption, is_held_out, render, to_uint8

CENTRE, SPREAD = (0.8, 0.8, 0.75), (0.15, 0.15, 0.15)
"""Truth is regressed as (truth - CENTRE) / SPREAD."""


def graded_defects(batch: int, generator: torch.Generator) -> Defects:
    """Each defect strikes half of the clips, evenly graded up to a bit beyond what pretraining shows."""
    device = generator.device

    def graded(most: float) -> torch.Tensor:
        draw = torch.rand(2, batch, generator=generator, device=device)
        return most * draw[0] * (draw[1] < 0.5)

    return Defects(blur=graded(5.0), fade=graded(0.6), stall=graded(0.65), wobble=graded(3.0))


def perturbed(specs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Half of the rows unchanged, the others wrong in one to three attributes; int64 [B, 6]."""
    device, result = generator.device, specs.clone()
    wrong = torch.randint(1, 4, (len(specs), 1), generator=generator, device=device)
    wrong = wrong * (torch.rand(len(specs), 1, generator=generator, device=device) < 0.5)
    order = torch.rand(specs.shape, generator=generator, device=device).argsort(1)
    for column in range(specs.shape[1]):
        offset = torch.randint(1, len(VALUES[column]), (len(specs),), generator=generator, device=device)
        changed = (specs[:, column] + offset) % len(VALUES[column])
        result[:, column] = torch.where(order[:, column] < wrong[:, 0], changed, specs[:, column])
    return result


class Clips:
    """Draws training clips: renders, renders through the VAE, samples of the policy.

    Args: vae: decoder of the policy or None. samples: (frames uint8 [N, T, H, W, 3], specs [N, 6]) or None.
    """

    def __init__(self, vae, samples, specs: list[tuple[int, ...]], generator: torch.Generator):
        self.vae, self.samples, self.generator = vae, samples, generator
        self.table = torch.tensor(specs, device=generator.device)

    @torch.no_grad()
    def draw(self, batch: int) -> tuple[torch.Tensor, list[str]]:
        """(frames uint8 [batch, T, H, W, 3], captions) with roughly equal shares of what is there."""
        device = self.generator.device
        rows = torch.randint(len(self.table), (batch,), generator=self.generator, device=device)
        specs = self.table[rows]
        video = render(specs, graded_defects(batch, self.generator), self.generator)
        frames = to_uint8(video)
        third = batch // 3
        if self.vae is not None:
            latents = self.vae.encode(video[: 2 * third] * 2 - 1).latent_dist.mean
            frames[: 2 * third] = to_uint8(self.vae.decode(latents).sample / 2 + 0.5)
        if self.samples is not None:
            pool, pool_specs = self.samples
            chosen = torch.randint(len(pool), (third,), generator=self.generator, device=device)
            frames[:third], specs[:third] = pool[chosen], pool_specs[chosen]
        return frames, [caption(tuple(spec)) for spec in perturbed(specs, self.generator).tolist()]


def policy_samples(
    model: HunyuanVideo, specs: list[tuple[int, ...]], per_prompt: int, shift: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of the policy for its own prompts: (frames uint8 [N, T, H, W, 3], specs [N, 6])."""
    shape = model.latent_shape(9, 32, 32)
    frames = []
    for index, spec in enumerate(specs):
        noise = torch.randn(per_prompt, *shape, generator=generator, device=generator.device)
        frames.append(sample_ode(model, caption(spec), noise, (8, 20)[index % 2], shift).to(generator.device))
    table = torch.tensor(specs, device=generator.device).repeat_interleave(per_prompt, 0)
    return torch.cat(frames), table


def targets(frames: torch.Tensor, prompts: list[str]) -> torch.Tensor:
    """Standardised truth, float32 [B, 3]."""
    truth = judge(frames, prompts)
    centre, spread = (torch.tensor(v, device=frames.device) for v in (CENTRE, SPREAD))
    return (torch.stack([truth.vq, truth.mq, truth.ta], 1) - centre) / spread


def train(model: VideoAlign, clips: Clips, minutes: float, batch: int) -> None:
    """Regress truth with AdamW; all weights train, base and LoRA."""
    model.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), 1.5e-3, betas=(0.9, 0.98), weight_decay=1e-3)
    timer, step = Timer(optimizer, minutes), 0
    while timer.running():
        frames, prompts = clips.draw(batch)
        wanted = targets(frames, prompts)
        loss = (model(model.prepare(list(frames), prompts, FPS)) - wanted).square().mean(0)
        optimizer.zero_grad()
        loss.sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 250 == 0:
            print(f"reward step {step}: error VQ {loss[0]:.3f} MQ {loss[1]:.3f} TA {loss[2]:.3f}", flush=True)
        step += 1
    model.eval().requires_grad_(False)


@torch.no_grad()
def raw_scores(model: VideoAlign, frames: torch.Tensor, prompts: list[str], batch: int = 128) -> torch.Tensor:
    """float32 [N, 3] in batches."""
    parts = [
        model(model.prepare(list(frames[i : i + batch]), prompts[i : i + batch], FPS)).float()
        for i in range(0, len(frames), batch)
    ]
    return torch.cat(parts)


def rank_correlation(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """Spearman's rank correlation of every column."""
    ranks = [x.argsort(0).argsort(0).double() for x in (a, b)]
    return [torch.corrcoef(torch.stack([ranks[0][:, k], ranks[1][:, k]]))[0, 1].item() for k in range(a.shape[1])]


def report(model: VideoAlign, title: str, frames: torch.Tensor, prompts: list[str]) -> torch.Tensor:
    """Print the rank correlation of every axis with truth; returns the raw scores."""
    scores = raw_scores(model, frames, prompts)
    found = rank_correlation(scores, targets(frames, prompts))
    print(
        f"{title}: rank correlation VQ {found[0]:.3f} MQ {found[1]:.3f} TA {found[2]:.3f} over {len(frames)} clips",
        flush=True,
    )
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--policy", type=Path, help="pipeline directory whose VAE and samples are trained on")
    parser.add_argument("--vae", type=Path, help="VAE folder, when there is no policy yet")
    parser.add_argument("--start", type=Path, help="VideoReward folder to go on from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--samples", type=int, default=60, help="samples of each of every fifth training prompt")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(arguments.seed)
    generator = torch.Generator(arguments.device).manual_seed(arguments.seed + 1)
    folder = arguments.out / "VideoReward"
    if arguments.start:
        model = VideoAlign.load(arguments.start, arguments.device, torch.float32)
    else:
        model = new_model(folder, arguments.device, arguments.seed)
    vae = samples = policy = None
    held_out = [spec for spec in SPECS if is_held_out(spec)]
    if arguments.policy:
        policy, shift = HunyuanVideo.load(arguments.policy, device=arguments.device), scheduler_shift(arguments.policy)
        vae = policy.vae
        start = time.monotonic()
        samples = policy_samples(policy, TRAIN_SPECS[::5], arguments.samples, shift, generator)
        print(f"sampled {len(samples[0])} clips in {time.monotonic() - start:.0f} s", flush=True)
    elif arguments.vae:
        vae = batched_vae(AutoencoderKLHunyuanVideo15.from_pretrained(arguments.vae).to(arguments.device)).eval()
    train(model, Clips(vae, samples, TRAIN_SPECS, generator), arguments.minutes, arguments.batch)
    model.load_state_dict({k: v.to(torch.bfloat16).float() for k, v in model.state_dict().items()})
    report(model, "held-out renders", *Clips(None, None, held_out, generator).draw(600))
    if vae is not None:
        report(model, "held-out renders through the VAE", *Clips(vae, None, held_out, generator).draw(600))
    mean, std = torch.zeros(3), torch.ones(3)
    if policy is not None:
        frames, specs = policy_samples(policy, held_out[::5], 8, shift, generator)
        report(model, "policy samples, held-out prompts", frames, [caption(tuple(s)) for s in specs.tolist()])
        frames, specs = policy_samples(policy, TRAIN_SPECS[::7], 8, shift, generator)
        scores = report(model, "policy samples, new seeds", frames, [caption(tuple(s)) for s in specs.tolist()])
        mean, std = scores.mean(0).cpu(), scores.std(0).cpu()
    constants = {f"{a}_mean": mean[k].item() for k, a in enumerate(("VQ", "MQ", "TA"))}
    constants |= {f"{a}_std": std[k].item() for k, a in enumerate(("VQ", "MQ", "TA"))}
    write_reward(folder, model.official_state(), constants, arguments.seed)


if __name__ == "__main__":
    main()
