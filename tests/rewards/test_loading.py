"""load: strict about keys and shapes, equal from every file layout, sized as the official checkpoint."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_ray.rewards.convert import convert
from sage_ray.rewards.initial_state import Sizes, base_config
from sage_ray.rewards.network import RewardNetwork
from sage_ray.rewards.reward_tokenizer import train_tokenizer
from sage_ray.rewards.videoalign import VideoAlign
from tests.rewards.golden import clip, write_golden

CLIP = [clip(1, 9, 48, 64)]
EMBEDDING = "base_model.model.model.embed_tokens.weight"
PTH, SAFE = "checkpoint-11352/model.pth", "checkpoint-11352/model.safetensors"


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / PTH, weights_only=True)


def test_split_files_score_like_the_whole(golden_model, folder):
    state = state_of(folder)
    (folder / PTH).unlink()
    where = folder / "checkpoint-11352"
    save_file(
        {key.replace(".default", ""): tensor for key, tensor in state.items() if "lora_" in key},
        where / "adapter_model.safetensors",
    )
    with pytest.raises(ValueError, match=r"non_lora_state_dict\.pth: the weight file is missing"):
        VideoAlign.check(folder)
    rest = {key: tensor for key, tensor in state.items() if "lora_" not in key}
    expected = golden_model.score(CLIP, ["a boat"], 8.0)
    for dropped in ([], ["base_model.model.lm_head.weight"]):
        kept = {key: tensor for key, tensor in rest.items() if key not in dropped}
        torch.save(kept, where / "non_lora_state_dict.pth")
        assert torch.equal(VideoAlign.load(folder).score(CLIP, ["a boat"], 8.0), expected)


def test_the_newest_checkpoint_is_used(golden_model, folder):
    shutil.copytree(folder / "checkpoint-11352", folder / "checkpoint-9")
    torch.save({}, folder / "checkpoint-9" / "model.pth")
    assert torch.equal(VideoAlign.load(folder).score(CLIP, [""], 8.0), golden_model.score(CLIP, [""], 8.0))


@pytest.mark.parametrize(
    "key",
    [
        EMBEDDING,
        "base_model.model.rm_head.weight",
        "base_model.model.lm_head.weight",
        "base_model.model.visual.blocks.1.attn.qkv.bias",
        "base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight",
    ],
)
def test_missing_key_is_named(folder, key):
    state = state_of(folder)
    del state[key]
    torch.save(state, folder / PTH)
    with pytest.raises(ValueError, match="1 keys are missing") as error:
        VideoAlign.load(folder)
    assert key in str(error.value)


@pytest.mark.parametrize("key", ["base_model.model.visual.extra", "base_model.model.model.language_model.norm.weight"])
def test_extra_key_is_named(folder, key):
    torch.save(state_of(folder) | {key: torch.zeros(3)}, folder / PTH)
    with pytest.raises(ValueError, match="1 keys are unexpected") as error:
        VideoAlign.load(folder)
    assert key in str(error.value)


def test_wrong_shape_is_named(folder):
    torch.save(state_of(folder) | {"base_model.model.rm_head.weight": torch.zeros(3, 64)}, folder / PTH)
    with pytest.raises(ValueError, match=r"rm_head.weight has shape \[3, 64\], must be \[1, 64\]"):
        VideoAlign.load(folder)


def test_lm_head_must_equal_the_embedding(folder):
    state = state_of(folder)
    state["base_model.model.lm_head.weight"][5, 7] += 1
    torch.save(state, folder / PTH)
    with pytest.raises(ValueError, match="lm_head.weight differs from"):
        VideoAlign.load(folder)


def test_pickled_code_is_refused(folder):
    torch.save({"x": Path("x")}, folder / PTH)
    with pytest.raises(ValueError, match=r"model\.pth"):
        VideoAlign.load(folder)


def test_safetensors_equal_pth(golden_model, tmp_path):
    folder = write_golden(tmp_path / "VideoReward", weights_file="model.safetensors")
    stored = load_file(folder / SAFE)
    assert EMBEDDING in stored
    model = VideoAlign.load(folder)
    assert torch.equal(model.score(CLIP, ["a boat"], 8.0), golden_model.score(CLIP, ["a boat"], 8.0))
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())


def test_official_size():
    """1123 keys and 5,030,744,064 tensor bytes, as the published model.pth has."""
    tokenizer = train_tokenizer(["a"], 270)
    sizes = Sizes(1536, 28, 12, 2, 8960, vision_dim=1280, vision_depth=32, vision_heads=16)
    lora = {"lora_enable": True, "lora_r": 64, "lora_alpha": 128}
    network = RewardNetwork(base_config(sizes, tokenizer), 151660, lora, 1)
    assert len(network.official_names()) + 1 == 1123
    numbers = sum(parameter.numel() for parameter in network.parameters())
    assert 2 * (numbers + 151660 * 1536) == 5_030_744_064


def test_conversion_writes_a_copy_that_scores_the_same_and_is_read_from_then_on(golden_model, folder):
    expected = golden_model.score(CLIP, ["a boat"], 8.0)
    assert convert(folder) == folder / SAFE
    assert not list((folder / "checkpoint-11352").glob("*.partial"))
    (folder / PTH).unlink()
    assert torch.equal(VideoAlign.load(folder).score(CLIP, ["a boat"], 8.0), expected)
    with pytest.raises(ValueError, match=r"model\.safetensors: is there already"):
        convert(folder)


def test_conversion_refuses_what_loading_refuses_and_leaves_no_file(folder):
    state = state_of(folder)
    state["base_model.model.lm_head.weight"][5, 7] += 1
    torch.save(state, folder / PTH)
    with pytest.raises(ValueError, match="lm_head.weight differs from"):
        convert(folder)
    assert [file.name for file in (folder / "checkpoint-11352").glob("model.*")] == ["model.pth"]
