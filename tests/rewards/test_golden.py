"""Scores equal upstream's own on a tiny checkpoint: float32, bfloat16, and the rotary rule on its own."""

import dataclasses
import hashlib
import json

import pytest
import torch

from sage_ray.rewards.video_input import read_video
from sage_ray.rewards.videoalign import VideoAlign
from sage_ray.types import AXES
from tests.rewards.golden import DATA, GOLDEN, golden_clip, golden_state, sha256, state_sha256, write_golden

SINGLE = [name for name, case in GOLDEN["sets"]["fp32@torch2.13"]["cases"].items() if len(case["videos"]) == 1]


def errors(model: VideoAlign, set_name: str) -> torch.Tensor:
    """|raw score - upstream's| of all cases of a set, [n, 3]; the normalised scores are held to upstream's, too."""
    found, rules = [], model.rules
    for case in GOLDEN["sets"][set_name]["cases"].values():
        model.rules = dataclasses.replace(rules, **case["overrides"])
        for name, prompt, raw, normed in zip(case["videos"], case["prompts"], case["raw"], case["normed"], strict=True):
            clip, fps = golden_clip(name)
            score = model.score([clip], [prompt], fps)[0]
            mean, std = torch.tensor(model.mean).double(), torch.tensor(model.std).double()
            off = (score * std + mean - torch.tensor([raw[axis] for axis in AXES]).double()).abs()
            off_normed = (score - torch.tensor([normed[axis] for axis in AXES]).double()).abs()
            assert torch.allclose(off_normed * std, off, atol=1e-6)
            found.append(off)
    model.rules = rules
    return torch.stack(found)


def test_the_generators_make_upstreams_inputs(golden_folder):
    digests = GOLDEN["checkpoints"]
    state = golden_state(657)
    assert state_sha256(state) == digests["state_sha256"]["fp32"]
    assert state_sha256({key: tensor.bfloat16() for key, tensor in state.items()}) == digests["state_sha256"]["bf16"]
    for name in ("merges.txt", "vocab.json"):
        content = (golden_folder / "checkpoint-11352" / "tokenizer" / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digests[f"{name.split('.')[0]}_sha256"]
    assert sha256((DATA / "prompt_template.txt").read_bytes()) == GOLDEN["prompt_template_sha256"]
    for name, made in GOLDEN["videos"].items():
        assert sha256(golden_clip(name)[0]) == made["uint8_THWC_sha256"]


@pytest.mark.parametrize("name", SINGLE)
def test_inputs_are_byte_equal(golden_model, name):
    case = GOLDEN["sets"]["fp32@torch2.13"]["cases"][name]
    rules = golden_model.rules
    golden_model.rules = dataclasses.replace(rules, **case["overrides"])
    clip, fps = golden_clip(case["videos"][0])
    inputs = golden_model.prepare([clip], case["prompts"], fps)
    golden_model.rules = rules
    assert [list(inputs.grid)] == case["video_grid_thw"]
    assert inputs.reward_positions.tolist() == case["reward_token_positions"]
    assert sha256(inputs.token_ids) == case["input_ids_sha256"]
    assert list(inputs.patches.shape) == case["pixel_values_shape"]
    assert sha256(inputs.patches) == case["pixel_values_sha256"]


@pytest.mark.parametrize("set_name", ["fp32@torch2.13", "fp32@exact"])
def test_float32(golden_model, set_name):
    assert errors(golden_model, set_name).max() < 1e-4


def test_rotary_tables_are_rounded_as_the_weights_were_trained(golden_folder, tmp_path):
    folder = write_golden(tmp_path / "VideoReward")
    config = json.loads((folder / "model_config.json").read_text())
    config["model_config"]["torch_dtype"] = "bfloat16"
    (folder / "model_config.json").write_text(json.dumps(config))
    rounded = VideoAlign.load(folder, dtype=torch.float32)
    assert errors(rounded, "fp32_ropebf16@torch2.13").max() < 1e-4
    assert errors(rounded, "fp32@torch2.13").max() > 0.2


def test_bfloat16(tmp_path):
    model = VideoAlign.load(write_golden(tmp_path / "VideoReward", "bfloat16"))
    assert model.dtype == torch.bfloat16
    off = errors(model, "bf16@torch2.13")
    assert off.mean() < 0.12
    assert off.max() < 0.4


def test_video_file(golden_model):
    case = GOLDEN["sets"]["mp4_decord_fp32@exact"]["cases"]["A"]
    frames, fps = read_video(DATA / "synthetic_A.mp4")
    assert frames.shape == (49, 240, 320, 3)
    assert fps == 24.0
    assert sha256(golden_model.prepare([frames], case["prompts"], fps).patches) == case["pixel_values_sha256"]
    expected = [[raw[axis] for axis in AXES] for raw in case["normed"]]
    torch.testing.assert_close(
        golden_model.score([frames], case["prompts"], fps), torch.tensor(expected).double(), atol=1e-4, rtol=0
    )


def test_output_dim_3_reads_the_diagonal(tmp_path):
    model = VideoAlign.load(write_golden(tmp_path / "VideoReward", output_dim=3))
    clip, fps = golden_clip("A")
    inputs = model.prepare([clip[:8, :64, :64]], ["a boat"], fps)
    head = model.network.rm_head.weight
    scores = model(inputs)
    for axis in range(3):
        only = torch.zeros_like(head)
        only[axis] = head[axis]
        model.network.rm_head.weight = torch.nn.Parameter(only, requires_grad=False)
        expected = torch.zeros(3)
        expected[axis] = scores[0, axis]
        torch.testing.assert_close(model(inputs)[0], expected)
