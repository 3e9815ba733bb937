"""score: batches equal singles, prompts cannot inject tokens, VQ and MQ are blind to the prompt, errors name inputs."""

import numpy as np
import pytest
import torch

from sage_ray.rewards.checkpoint import REWARD_TOKENS
from tests.rewards.golden import NORM, clip

CLIPS = [clip(seed, 9, 48, 64) for seed in (1, 2, 3)] + [clip(4, 16, 64, 48)]
PROMPTS = ["a red boat", "two dogs chase a blue ball on wet grass, heavy rain", "", "a boat {0} 100%"]


def test_batch_equals_one_at_a_time(golden_model, monkeypatch):
    batch = golden_model.score(CLIPS, PROMPTS, 8.0)
    assert batch.dtype == torch.float64
    assert batch.shape == (4, 3)
    single = torch.cat([golden_model.score([c], [p], 8.0) for c, p in zip(CLIPS, PROMPTS, strict=True)])
    torch.testing.assert_close(batch, single, atol=2e-5, rtol=0)
    order = [3, 1, 0, 2]
    mixed = golden_model.score([CLIPS[i] for i in order], [PROMPTS[i] for i in order], 8.0)
    torch.testing.assert_close(mixed, batch[order], atol=2e-5, rtol=0)
    monkeypatch.setattr("sage_ray.rewards.videoalign.MAX_BATCH", 2)
    torch.testing.assert_close(golden_model.score(CLIPS, PROMPTS, 8.0), batch, atol=2e-5, rtol=0)


def test_arrays_and_tensors_score_alike(golden_model):
    stacked = np.stack(CLIPS[:2])
    expected = golden_model.score(CLIPS[:2], PROMPTS[:2], 8.0)
    assert torch.equal(golden_model.score(stacked, PROMPTS[:2], 8.0), expected)
    assert torch.equal(golden_model.score(torch.tensor(stacked), PROMPTS[:2], 8.0), expected)
    assert golden_model.score([], [], 8.0).shape == (0, 3)


def test_visual_and_motion_quality_do_not_depend_on_the_prompt(golden_model):
    scores = torch.cat([golden_model.score(CLIPS[:1], [prompt], 8.0) for prompt in PROMPTS])
    torch.testing.assert_close(scores[:, :2], scores[:1, :2].expand(4, 2), atol=2e-5, rtol=0)
    assert scores[:, 2].std() > 0.05


def test_normalisation(golden_model):
    raw = golden_model(golden_model.prepare(CLIPS[:1], ["a boat"], 8.0)).double()
    score = golden_model.score(CLIPS[:1], ["a boat"], 8.0)
    for i, axis in enumerate(("VQ", "MQ", "TA")):
        assert score[0, i] == (raw[0, i].item() - NORM[f"{axis}_mean"]) / NORM[f"{axis}_std"]


@pytest.mark.parametrize("token", [*REWARD_TOKENS, "<|video_pad|>", "<|im_end|>", "<|endoftext|>", "<|vision_start|>"])
def test_prompt_cannot_inject_a_token(golden_model, token):
    prompt = f"a boat {token * 3} on a lake"
    with pytest.raises(ValueError, match="must not hold a special token") as error:
        golden_model.score(CLIPS[:2], ["fine", prompt], 8.0)
    assert repr(prompt) in str(error.value)
    assert token in str(error.value)


def test_half_a_token_stays_text(golden_model):
    ids, positions = golden_model.prompts.encode("<|TA_reward| > |TA_reward|> <|video_pad <| im_end |>")
    assert golden_model.prompts.tokenizer.decode(ids.tolist(), skip_special_tokens=False).count("<|TA_reward|>") == 1
    assert len(positions) == 3


def test_fps_is_required_and_matters(golden_model):
    with pytest.raises(TypeError):
        golden_model.score(CLIPS[:1], PROMPTS[:1])
    with pytest.raises(ValueError, match=r"fps=0"):
        golden_model.score(CLIPS[:1], PROMPTS[:1], 0)
    slow, fast = (golden_model.prepare(CLIPS[3:], PROMPTS[:1], fps).grid[0] for fps in (4.0, 8.0))
    assert (slow, fast) == (4, 2)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        (CLIPS[0].astype(np.float32), "must be uint8"),
        (torch.zeros(9, 48, 64, 3), "must be uint8"),
        (CLIPS[0][0], "must be an array"),
        (CLIPS[0].transpose(0, 3, 1, 2), "must be an array"),
        (CLIPS[0][:0], "must be an array"),
        ("clip.mp4", "must be an array"),
    ],
)
def test_wrong_clip_is_named(golden_model, wrong, rule):
    with pytest.raises(ValueError, match=rf"^videos\[1\]: {rule}"):
        golden_model.score([CLIPS[0], wrong], PROMPTS[:2], 8.0)


def test_wrong_lists_are_refused(golden_model):
    with pytest.raises(ValueError, match="got 2 for 1 videos"):
        golden_model.score(CLIPS[:1], PROMPTS[:2], 8.0)
    with pytest.raises(ValueError, match="one text a video"):
        golden_model.score(CLIPS[:1], "x", 8.0)
    with pytest.raises(ValueError, match="must be a text"):
        golden_model.score(CLIPS[:1], [None], 8.0)
    with pytest.raises(ValueError, match="clips of one shape"):
        golden_model.prepare(CLIPS, PROMPTS, 8.0)
    with pytest.raises(ValueError, match="1 frames"):
        golden_model.score([CLIPS[0][:1]], PROMPTS[:1], 8.0)
