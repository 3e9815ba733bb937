"""Which folders are a policy, which are refused by name and rule, and that loading changes no bit but by dtype."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sage_ray.models.lora import FILE, METADATA, save_adapter
from sage_ray.models.policy_folder import WEIGHTS, PolicyFolder, find_policy, load_policy
from tests.conftest import POLICY
from tests.models.test_lora import BF16, FP32, adapted

BASE = POLICY / "transformer"


def moved(model: HunyuanVideo15Transformer3DModel, scale: float) -> HunyuanVideo15Transformer3DModel:
    """`model` with every weight changed, as training would, in place."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def changed(scale: float = 0.005) -> HunyuanVideo15Transformer3DModel:
    """The shipped transformer with every weight changed."""
    return moved(HunyuanVideo15Transformer3DModel.from_pretrained(BASE, torch_dtype=FP32), scale)


def checkpoint(folder: Path, policy: HunyuanVideo15Transformer3DModel) -> Path:
    """A checkpoint in the layout of actors/learner.py; of an adapted model A and B alone."""
    if getattr(policy, "peft_config", None):
        save_adapter(policy, folder / "adapter")
    else:
        (folder / "transformer").mkdir(parents=True)
        save_file(policy.state_dict(), folder / "transformer" / WEIGHTS, metadata={"format": "pt"})
        policy.save_config(folder / "transformer")
    (folder / "trainer.json").write_text(json.dumps({"policy_version": 7, "kl_controller": {}}))
    return folder


def same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_every_folder_that_holds_a_policy_is_found(tmp_path) -> None:
    full, lora = checkpoint(tmp_path / "full", changed()), checkpoint(tmp_path / "lora", adapted().transformer)
    shutil.copytree(full / "transformer", full / "transformer_average")
    shutil.copytree(lora / "adapter", lora / "adapter_average")
    for given in (full, full / "transformer"):
        assert find_policy(given) == PolicyFolder(full / "transformer", "transformer")
    for given in (lora, lora / "adapter"):
        assert find_policy(given) == PolicyFolder(lora / "adapter", "adapter")
    assert find_policy(POLICY) == PolicyFolder(BASE, "transformer")
    assert find_policy(full / "transformer_average").kind == "transformer"
    assert find_policy(lora / "adapter_average").kind == "adapter"


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_transformer_is_loaded_bit_by_bit_sharded_or_not(tmp_path, dtype) -> None:
    policy = changed()
    expected = {name: tensor.to(dtype) for name, tensor in policy.state_dict().items()}
    policy.save_pretrained(tmp_path / "sharded", max_shard_size="3MB")
    assert (tmp_path / "sharded" / f"{WEIGHTS}.index.json").is_file()
    for folder in (checkpoint(tmp_path / "whole", policy), tmp_path / "sharded"):
        loaded = load_policy(find_policy(folder), POLICY, dtype)
        assert same_bits(loaded.state_dict(), expected) and not loaded.training
        assert {(p.dtype, p.device.type) for p in loaded.parameters()} == {(dtype, "cpu")}
        assert all(p.data_ptr() % 64 == 0 for p in loaded.parameters())


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("stored", [FP32, BF16])
def test_an_adapter_is_summed_in_float32_and_rounded_once(tmp_path, dtype, stored) -> None:
    base = tmp_path / "base"
    changed().to(stored).save_pretrained(base)  # the shipped weights are bfloat16 numbers already
    trained = adapted(rank=3, alpha=5.0, targets=["to_q", "ff.net.2"]).transformer
    before = load_file(base / WEIGHTS)
    found = load_policy(find_policy(checkpoint(tmp_path / "lora", trained)), base, dtype).state_dict()
    state = {name: parameter.detach() for name, parameter in trained.named_parameters()}
    for name, weight in before.items():
        expected, layer = weight.float(), name.removesuffix(".weight")
        if (a := state.get(f"{layer}.lora_A.default.weight")) is not None:
            expected = expected + 5.0 / 3 * (state[f"{layer}.lora_B.default.weight"] @ a)
            assert not torch.equal(found[name], weight.to(dtype))
        assert torch.equal(found[name], expected.to(dtype)), name
    assert found.keys() == before.keys() and same_bits(load_file(base / WEIGHTS), before)


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        find_policy(folder)
    return str(caught.value)


def test_what_is_no_policy_or_half_written_is_named(tmp_path) -> None:
    assert "must be a checkpoint or a pipeline directory" in refusal(tmp_path)
    assert "must be a checkpoint or a pipeline directory" in refusal(tmp_path / "none")
    assert "_class_name is 'AutoencoderKLHunyuanVideo15'" in refusal(POLICY / "vae")
    full = checkpoint(tmp_path / "version.partial", changed())
    for folder in (full, full / "transformer"):
        assert "is half written" in refusal(folder)
    full = full.rename(tmp_path / "version")
    (full / "adapter").mkdir()
    assert "holds transformer/ and adapter/" in refusal(full)
    (full / "transformer").rename(tmp_path / "kept")
    assert f"must hold {FILE}" in refusal(full)
    weights = tmp_path / "kept" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1])
    assert f"{weights}: half-written" in refusal(tmp_path / "kept")
    weights.unlink()
    assert f"{weights}: the file does not exist" in refusal(tmp_path / "kept")


def test_a_missing_shard_and_a_tensor_of_another_shape_are_named(tmp_path) -> None:
    changed().save_pretrained(tmp_path / "sharded", max_shard_size="3MB")
    shard = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
    shard.unlink()
    assert f"{shard}: the file does not exist" in refusal(tmp_path / "sharded")
    folder = checkpoint(tmp_path / "full", changed()) / "transformer"
    state = load_file(folder / WEIGHTS)
    for new, rule in (
        (state["proj_out.weight"][:-1], "is (7, 64), config.json makes it (8, 64)"),
        (None, "is missing"),
    ):
        edited = {name: tensor for name, tensor in state.items() if name != "proj_out.weight"}
        save_file(edited if new is None else edited | {"proj_out.weight": new}, folder / WEIGHTS)
        assert f"proj_out.weight {rule}" in refusal(folder)


@pytest.mark.parametrize(
    ("key", "value"), [("rope_theta", 10000.0), ("target_size", 960), ("rope_axes_dim", [8, 4, 4])]
)
def test_another_configuration_than_the_base_s_is_named(tmp_path, key, value) -> None:
    folder = checkpoint(tmp_path / "full", changed()) / "transformer"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"_diffusers_version": "0.1", "_name_or_path": "elsewhere"})
    )
    load_policy(find_policy(folder), POLICY, FP32)
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match=rf"config.json: {key}="):
        load_policy(find_policy(folder), POLICY, FP32)


def test_an_adapter_that_does_not_fit_the_base_is_named(tmp_path) -> None:
    policy = find_policy(checkpoint(tmp_path / "lora", adapted(rank=2, targets=["to_q"]).transformer))
    state, path = load_file(policy.path / FILE), policy.path / FILE
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    key = "transformer.transformer_blocks.0.attn.to_q.lora_A.weight"

    def refused(state: dict[str, torch.Tensor], **header: object) -> str:
        words = json.dumps(json.loads(metadata[METADATA]) | {f"transformer.{k}": v for k, v in header.items()})
        save_file(state, path, metadata=metadata | {METADATA: words})
        with pytest.raises(ValueError) as caught:
            load_policy(policy, POLICY, FP32)
        return str(caught.value)

    assert f"{path}: {key} is (2, 63), rank 2" in refused(state | {key: state[key][:, :63].contiguous()})
    assert f"{path}: {key} is missing" in refused({k: v for k, v in state.items() if k != key})
    assert "stranger.lora_A.weight is (2, 2)" in refused(
        state | {f"transformer.stranger.lora_{half}.weight": torch.ones(2, 2) for half in "AB"}
    )
    assert "is (2, 64), rank 3" in refused(state, r=3)
    assert "use_rslora=True, which cannot be merged" in refused(state, use_rslora=True)
    unread = {f"transformer.image_embedder.linear_1.lora_{k}.weight": torch.ones(shape) for k, shape in UNREAD.items()}
    assert "does not fit" in refused(state | unread)
    with pytest.raises(ValueError, match="not an adapter"):
        load_policy(policy, policy.path, FP32)


UNREAD = {"A": (2, 8), "B": (8, 2)}
"""Shapes that fit image_embedder.linear_1, which text-to-video never reads."""
