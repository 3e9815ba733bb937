"""Train the small CLIP: `python -m sage_ray.shapes.pretrain_clip OUT [--minutes 4] [--device cuda]`.

Contrastive training on single frames of rendered clips and their captions, as a judge that shares nothing with the
small VideoAlign. A frame shows size, colour, shape and background; captions that differ only in direction or speed
are both right for it, so the model learns to pass over those words. Held-out triples never occur. Writes a CLIP folder
that `ClipScore.load` and transformers read.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from sage_ray.rewards.clip_score import ClipScore, unit
from sage_ray.rewards.video_input import MEAN, STD
from sage_ray.shapes.pretrain_policy import TRAIN_SPECS, Timer
from sage_ray.shapes.pretrain_reward import graded_defects, perturbed, rank_correlation
from sage_ray.shapes.truth import judge
from sage_ray.shapes.world import ATTRIBUTES, FPS, HEIGHT, SPECS, VALUES, caption, is_held_out, render, to_uint8

VISIBLE = [ATTRIBUTES.index(name) for name in ("size", "colour", "shape", "background")]
"""Columns of a spec that a single frame shows."""
WIDTH, HEADS, PATCH = 64, 4, 8
"""Width and heads of both towers; side of an image patch in pixels."""
FRAMES_PER_CLIP = 2
"""Frames of every rendered clip that are trained on."""
MAX_LOGIT_SCALE = math.log(100.0)
"""CLIP's bound of the temperature."""


def clip_tokenizer() -> CLIPTokenizer:
    """CLIP's byte-level BPE in which every word of the captions is one token; any text can be encoded.

    Ids in CLIP's order: the 256 bytes, each as the end of a word, merges, start and end token.
    """
    ours = CLIPTokenizer().backend_tokenizer
    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    trained.normalizer, trained.pre_tokenizer = ours.normalizer, ours.pre_tokenizer
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1024, show_progress=False, initial_alphabet=letters, end_of_word_suffix="</w>"
    )
    trained.train_from_iterator([caption(spec) for spec in SPECS], trainer)
    merges = [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    words = [*letters, *(f"{letter}</w>" for letter in letters), *("".join(merge) for merge in merges)]
    words = list(dict.fromkeys([*words, "<|startoftext|>", "<|endoftext|>"]))
    return CLIPTokenizer({word: i for i, word in enumerate(words)}, merges, model_max_length=77)


def clip_config(tokenizer: CLIPTokenizer) -> CLIPConfig:
    """Sizes of the small CLIP."""
    tower = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": HEADS}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = tower | ends | {"vocab_size": len(tokenizer), "num_hidden_layers": 2, "pad_token_id": ends["eos_token_id"]}
    vision = tower | {"image_size": HEIGHT, "patch_size": PATCH, "num_hidden_layers": 3}
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH)


def write_clip(folder: Path, model: CLIPModel, tokenizer: CLIPTokenizer) -> None:
    """Write a CLIP folder, weights in bfloat16; `model` is left as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: tensor.to("cpu", torch.bfloat16) for key, tensor in model.state_dict().items()}
    stored = CLIPModel(model.config).to(torch.bfloat16)
    stored.load_state_dict(state)
    stored.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    steps = dict.fromkeys(("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb"), True)
    sizes = {"size": {"shortest_edge": HEIGHT}, "crop_size": {"height": HEIGHT, "width": HEIGHT}, "resample": 3}
    constants = {"rescale_factor": 1 / 255, "image_mean": list(MEAN), "image_std": list(STD)}
    content = {"image_processor_type": "CLIPImageProcessor", **steps, **sizes, **constants}
    (folder / "preprocessor_config.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def new_clip(folder: Path, device: str, seed: int) -> ClipScore:
    """A random model in float32, ready to train; `folder` holds its first checkpoint."""
    torch.manual_seed(seed)
    tokenizer = clip_tokenizer()
    write_clip(folder, CLIPModel(clip_config(tokenizer)), tokenizer)
    return ClipScore.load(folder, device)


def draw_frames(batch: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(frames uint8 [batch, H, W, 3], specs [batch, 6]): random frames of training clips with graded defects."""
    device, num_clips = generator.device, -(-batch // FRAMES_PER_CLIP)
    table = torch.tensor(TRAIN_SPECS, device=device)
    specs = table[torch.randint(len(table), (num_clips,), generator=generator, device=device)]
    video = to_uint8(render(specs, graded_defects(num_clips, generator), generator))
    chosen = torch.rand(video.shape[:2], generator=generator, device=device).argsort(1)[:, :FRAMES_PER_CLIP]
    frames = video[torch.arange(num_clips, device=device)[:, None], chosen].flatten(0, 1)
    return frames[:batch], specs.repeat_interleave(FRAMES_PER_CLIP, 0)[:batch]


def contrastive_loss(logits: torch.Tensor, specs: torch.Tensor) -> torch.Tensor:
    """CLIP's symmetric cross-entropy, every pair whose visible attributes agree an equally right one.

    Args: logits: [B, B], scaled cosines of image i and text j. specs: int64 [B, 6] of both. Returns: scalar.
    """
    seen = specs[:, VISIBLE]
    same = (seen[:, None] == seen[None]).all(-1).to(logits.dtype)
    right = same / same.sum(1, keepdim=True)
    return (functional.cross_entropy(logits, right) + functional.cross_entropy(logits.T, right)) / 2


def train(clip: ClipScore, minutes: float, batch: int, generator: torch.Generator) -> int:
    """Train all weights with AdamW. Returns the number of steps."""
    model = clip.model.train().requires_grad_(True)
    tokens = clip.prompts.batch([caption(spec) for spec in SPECS]).to(generator.device)
    strides = torch.tensor([math.prod(map(len, VALUES[i + 1 :])) for i in range(len(VALUES))], device=generator.device)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.98), weight_decay=1e-3)
    timer, step = Timer(optimizer, minutes), 0
    while timer.running():
        frames, specs = draw_frames(batch, generator)
        images = unit(clip.frame_features(frames)).float()
        texts = unit(clip.text_features(tokens[(specs * strides).sum(1)])).float()
        loss = contrastive_loss(model.logit_scale.exp() * images @ texts.T, specs)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=MAX_LOGIT_SCALE)
        if step % 250 == 0:
            print(f"clip step {step}: loss {loss.item():.4f}", flush=True)
        step += 1
    model.eval().requires_grad_(False)
    return step


def visible_truth(frames: torch.Tensor, prompts: list[str]) -> torch.Tensor:
    """Truth TA of the attributes that a frame shows, mean of four in [0, 1], float32 [B]. Args as `judge`."""
    return judge(frames, prompts).attributes[:, VISIBLE].mean(1)


def report(clip: ClipScore, num_clips: int, generator: torch.Generator) -> float:
    """Print and return the rank correlation of the score with visible truth, on held-out renders whose captions are
    half right and half wrong in one to three attributes."""
    device = generator.device
    table = torch.tensor([spec for spec in SPECS if is_held_out(spec)], device=device)
    specs = table[torch.randint(len(table), (num_clips,), generator=generator, device=device)]
    frames = to_uint8(render(specs, graded_defects(num_clips, generator), generator))
    prompts = [caption(tuple(spec)) for spec in perturbed(specs, generator).tolist()]
    scores = torch.from_numpy(clip.score(list(frames.cpu().numpy()), prompts, FPS))[:, 0]
    truth = visible_truth(frames, prompts).cpu()
    found = rank_correlation(scores[:, None], truth[:, None])[0]
    print(f"held-out renders: rank correlation of CLIP with visible TA {found:.3f} over {num_clips} clips", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--clips", type=int, default=600, help="held-out clips of the report")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    generator = torch.Generator(arguments.device).manual_seed(arguments.seed + 1)
    clip = new_clip(arguments.out, arguments.device, arguments.seed)
    steps = train(clip, arguments.minutes, arguments.batch, generator)
    write_clip(arguments.out, clip.model, clip.prompts.tokenizer)
    numbers = sum(parameter.numel() for parameter in clip.model.parameters())
    size_mib = sum(file.stat().st_size for file in arguments.out.iterdir()) / 2**20
    print(f"clip: {numbers} parameters, {steps} steps, {size_mib:.2f} MiB in {arguments.out}", flush=True)
    report(ClipScore.load(arguments.out, arguments.device), arguments.clips, generator)


if __name__ == "__main__":
    main()
