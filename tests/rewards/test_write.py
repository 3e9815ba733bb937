"""A reward model of our own: random start, gradients everywhere, a training step helps, write and load round trip."""

import json

import pytest
import torch

from sage_ray.rewards.initial_state import Sizes, base_config, random_state
from sage_ray.rewards.reward_tokenizer import train_tokenizer
from sage_ray.rewards.videoalign import VideoAlign
from sage_ray.rewards.videoalign_write import CheckpointSettings, write_checkpoint
from tests.rewards.golden import NORM, clip

TEMPLATE = "\nRate it.\nVQ <|VQ_reward|>\nMQ <|MQ_reward|>\nPrompt - {text_prompt}\nTA <|TA_reward|>\n"
CLIPS = [clip(seed, 9, 32, 32) for seed in range(6)]
PROMPTS = ["a red boat", "a blue ball"] * 3


def write(folder, state=None, **settings):
    tokenizer = train_tokenizer(["Rate it. Prompt - a red boat, a blue ball"], 300)
    config = base_config(Sizes(hidden=32, vision_dim=16), tokenizer)
    if state is None:
        state = random_state(config, tokenizer.get_vocab_size(with_added_tokens=True), 2, 1, seed=3)
    write_checkpoint(
        folder,
        state,
        settings=CheckpointSettings(lora_r=2, lora_alpha=4, **settings),
        base_config=config,
        tokenizer=tokenizer,
        prompt_template=TEMPLATE,
    )
    return state


def test_train_write_load(tmp_path):
    write(tmp_path / "start")
    model = VideoAlign.load(tmp_path / "start").train().requires_grad_(True)
    targets = torch.tensor([[1.0, -1.0, 0.5], [-1.0, 0.5, -0.5]] * 3)
    inputs = model.prepare(CLIPS, PROMPTS, 8.0)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    losses = []
    for _ in range(25):
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    unmoved = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert unmoved == []
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert losses[-1] < 0.6 * losses[0]

    scores = model.score(CLIPS, PROMPTS, 8.0)
    write(tmp_path / "trained", model.official_state())
    assert torch.equal(VideoAlign.load(tmp_path / "trained").score(CLIPS, PROMPTS, 8.0), scores)
    write(tmp_path / "normed", model.official_state(), inference_config=NORM)
    normed = VideoAlign.load(tmp_path / "normed").score(CLIPS, PROMPTS, 8.0)
    torch.testing.assert_close(normed, VideoAlign.load(tmp_path / "normed").normalise(scores), rtol=0, atol=0)


def test_state_is_a_function_of_the_seed_and_survives_the_disk(tmp_path):
    state = write(tmp_path / "a")
    loaded = VideoAlign.load(tmp_path / "a").official_state()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    assert all(not tensor.any() for key, tensor in state.items() if "lora_B" in key)
    again = write(tmp_path / "b", step=7)
    assert all(torch.equal(again[key], state[key]) for key in state)
    files = {str(path.relative_to(tmp_path / "b")) for path in (tmp_path / "b").rglob("*") if path.is_file()}
    tokenizer = ["added_tokens", "special_tokens_map", "tokenizer", "tokenizer_config", "vocab"]
    expected = {"base_config.json", "model_config.json", "prompt_template.txt", "checkpoint-7/model.safetensors"}
    expected |= {f"checkpoint-7/tokenizer/{name}.json" for name in tokenizer} | {"checkpoint-7/tokenizer/merges.txt"}
    assert files == expected
    with pytest.raises(ValueError, match="checkpoint-7"):
        write(tmp_path / "b", step=1)


def test_bfloat16_checkpoint(tmp_path):
    write(tmp_path, torch_dtype="bfloat16", weights_file="model.pth")
    config = json.loads((tmp_path / "model_config.json").read_text())
    assert config["model_config"]["torch_dtype"] == "bfloat16"
    assert "inference_config" not in config
    model = VideoAlign.load(tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.score(CLIPS[:1], PROMPTS[:1], 8.0).isfinite().all()


def test_base_config_rules():
    tokenizer = train_tokenizer(["a"], 270)
    assert base_config(Sizes(), tokenizer)["rope_scaling"]["mrope_section"] == [2, 3, 3]
    assert base_config(Sizes(hidden=1536, heads=12), tokenizer)["rope_scaling"]["mrope_section"] == [16, 24, 24]
    with pytest.raises(ValueError, match="hidden / heads=60/4"):
        base_config(Sizes(hidden=60), tokenizer)
    with pytest.raises(ValueError, match="vision_dim / vision_heads"):
        base_config(Sizes(vision_dim=20), tokenizer)
