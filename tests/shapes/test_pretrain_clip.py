"""The small CLIP: its tokenizer, its loss by hand, one step of training, and the command."""

import runpy
import sys

import pytest
import torch

from sage_ray.rewards.clip_score import ClipScore
from sage_ray.shapes import pretrain_clip
from sage_ray.shapes.pretrain_clip import clip_tokenizer, contrastive_loss, draw_frames, new_clip, train, visible_truth
from sage_ray.shapes.world import SPECS, Defects, caption, is_held_out, render, to_uint8


@pytest.fixture
def quick(monkeypatch) -> None:
    """The clock jumps, so that every training takes one step."""
    times = iter([0.0, 0.02] + [1e9] * 3)
    monkeypatch.setattr("sage_ray.shapes.pretrain_policy.time.monotonic", lambda: next(times))


def test_every_word_is_one_token_and_other_text_survives():
    tokenizer = clip_tokenizer()
    assert len(tokenizer) < 1024
    for spec in SPECS[::37]:
        text = caption(spec)
        ids = tokenizer(text).input_ids
        assert len(ids) == len(text.split()) + 2 and ids[-1] == tokenizer.eos_token_id == len(tokenizer) - 1
    ids = tokenizer("Zebras: 42 日本 é!", add_special_tokens=False).input_ids
    assert tokenizer.eos_token_id not in ids and tokenizer.decode(ids).replace(" ", "") == "zebras:42日本é!"


def test_loss_by_hand():
    """Specs 0 and 1 differ in direction and speed only, so each is as right for the other."""
    specs = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 0, 3, 1, 0], [1, 0, 0, 0, 0, 0]])
    perfect = torch.tensor([[9.0, 9.0, -9.0], [9.0, 9.0, -9.0], [-9.0, -9.0, 9.0]])
    expected = 2 / 3 * torch.log(torch.tensor(2.0))
    assert contrastive_loss(perfect, specs) == pytest.approx(expected.item(), abs=1e-4)
    assert contrastive_loss(torch.zeros(3, 3), specs).item() == pytest.approx(1.0986, abs=1e-4)


def test_frames_are_never_held_out():
    generator = torch.Generator().manual_seed(0)
    frames, specs = draw_frames(33, generator)
    assert frames.shape == (33, 32, 32, 3) and frames.dtype == torch.uint8 and specs.shape == (33, 6)
    assert not any(is_held_out(tuple(spec)) for spec in specs.tolist())


def test_visible_truth_ignores_direction_and_speed():
    spec = (1, 0, 1, 0, 0, 2)
    frames = to_uint8(render(torch.tensor([spec]), Defects.none(1), torch.Generator().manual_seed(0)))
    right, other_way, wrong = (
        visible_truth(frames, [caption(s)]).item() for s in (spec, (1, 0, 1, 3, 1, 2), (1, 2, 1, 0, 0, 2))
    )
    assert right == other_way > 0.9 and wrong == pytest.approx(right - 0.25, abs=0.02)


def test_training_steps_change_every_weight(tmp_path, quick):
    clip = new_clip(tmp_path / "CLIP", "cpu", 0)
    before = {name: tensor.clone() for name, tensor in clip.model.named_parameters()}
    assert sum(tensor.numel() for tensor in before.values()) < 1e6
    assert train(clip, 1.0, 8, torch.Generator().manual_seed(1)) == 1
    same = [name for name, tensor in clip.model.named_parameters() if torch.equal(tensor, before[name])]
    assert not same
    assert not clip.model.training and not any(p.requires_grad for p in clip.model.parameters())


def test_the_command_writes_a_folder_that_loads(tmp_path, quick, monkeypatch, capsys):
    out = tmp_path / "out"
    arguments = ["pretrain_clip", str(out), "--minutes", "1", "--device", "cpu", "--batch", "8", "--clips", "12"]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(pretrain_clip.__file__), run_name="__main__")
    printed = capsys.readouterr().out
    assert "1 steps" in printed and "rank correlation of CLIP with visible TA" in printed and "over 12 clips" in printed
    ClipScore.check(out)
    assert ClipScore.load(out).model.dtype == torch.float32
