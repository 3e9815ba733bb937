"""The shipped small CLIP is a judge of its own: it ranks held-out renders as the visible truth does."""

import torch

from sage_ray.rewards.clip_score import ClipScore
from sage_ray.shapes.pretrain_clip import visible_truth
from sage_ray.shapes.pretrain_reward import graded_defects, perturbed, rank_correlation
from sage_ray.shapes.world import FPS, SPECS, caption, is_held_out, render, to_uint8
from tests.conftest import ROOT


def test_rank_correlation_with_visible_truth_on_held_out_renders() -> None:
    generator = torch.Generator().manual_seed(5)
    table = torch.tensor([spec for spec in SPECS if is_held_out(spec)])
    specs = table[torch.randint(len(table), (200,), generator=generator)]
    frames = to_uint8(render(specs, graded_defects(200, generator), generator))
    prompts = [caption(tuple(spec)) for spec in perturbed(specs, generator).tolist()]
    scorer = ClipScore.load(ROOT / "assets" / "shapes" / "clip")
    scores = torch.from_numpy(scorer.score(list(frames.numpy()), prompts, FPS))
    assert rank_correlation(scores, visible_truth(frames, prompts)[:, None])[0] > 0.65
