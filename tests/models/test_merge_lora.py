"""The merge command writes a transformer that diffusers opens, and only reads what it merges."""

import hashlib

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel

from sage_ray.models.lora import merged_state, save_adapter
from sage_ray.models.merge_lora import merge
from tests.conftest import POLICY
from tests.models.test_lora import BF16, adapted

WEIGHTS = POLICY / "transformer" / "diffusion_pytorch_model.safetensors"


def test_merged_folder_opens_in_diffusers_and_the_base_is_untouched(tmp_path) -> None:
    before = hashlib.blake2b(WEIGHTS.read_bytes()).hexdigest()
    trained = adapted(rank=3, alpha=5.0, targets=["to_q", "ff.net.2"], dtype=BF16)
    save_adapter(trained.transformer, tmp_path / "adapter")
    folder = merge(POLICY, tmp_path / "adapter", tmp_path / "out")
    assert folder == tmp_path / "out" / "transformer" and not list(tmp_path.rglob("*.partial"))
    opened = HunyuanVideo15Transformer3DModel.from_pretrained(folder, torch_dtype=BF16)
    expected = merged_state(trained.transformer)
    found = opened.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    untrained = HunyuanVideo15Transformer3DModel.from_pretrained(POLICY / "transformer", torch_dtype=BF16).state_dict()
    changed = {name for name, tensor in untrained.items() if not torch.equal(found[name], tensor)}
    assert changed and all("to_q" in name or "ff.net.2" in name for name in changed)
    assert hashlib.blake2b(WEIGHTS.read_bytes()).hexdigest() == before


def test_what_cannot_be_merged_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="must hold pytorch_lora_weights.safetensors"):
        merge(POLICY, tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match="must be a HunyuanVideo15Pipeline directory"):
        merge(tmp_path, tmp_path, tmp_path / "out")
    (tmp_path / "out" / "transformer").mkdir(parents=True)
    with pytest.raises(ValueError, match="is there already"):
        merge(POLICY, tmp_path, tmp_path / "out")
