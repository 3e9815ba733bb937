"""Loading without a whole model in memory: the same bits as diffusers, whole or a share, and the memory it takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from safetensors.torch import load_file, save_file

from sage_ray.config import LoraConfig
from sage_ray.models.lora import adapt, save_adapter
from sage_ray.models.packed_velocity import PackedVelocity
from sage_ray.models.streamed import STEM, blank_transformer, fill, load_transformer
from sage_ray.models.tensor_files import write_tensors
from tests.conftest import POLICY, ROOT

BASE = POLICY / "transformer"


def rewrite(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text((BASE / "config.json").read_text())
    save_file(state, folder / f"{STEM}.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_as_diffusers_in_aligned_storage(dtype: torch.dtype) -> None:
    stock = HunyuanVideo15Transformer3DModel.from_pretrained(BASE, torch_dtype=dtype).state_dict()
    ours = load_transformer(BASE, dtype, "cpu")
    assert ours.state_dict().keys() == stock.keys() and not ours.training
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, stock[name]) and tensor.dtype == dtype, name
        assert tensor.data_ptr() % 64 == 0, name


def test_shards_load_as_one_file(tmp_path) -> None:
    state = load_file(BASE / f"{STEM}.safetensors")
    folder = tmp_path / "shards"
    write_tensors(folder, STEM, [(t.nbytes, lambda k=k, t=t: {k: t}) for k, t in state.items()], 10**6)
    (folder / "config.json").write_text((BASE / "config.json").read_text())
    assert len(list(folder.glob("*.safetensors"))) > 3
    loaded = load_transformer(folder, torch.bfloat16, "cpu").state_dict()
    assert all(torch.equal(loaded[name], tensor.bfloat16()) for name, tensor in state.items())


def test_a_blank_model_holds_the_byt5_projection_only_and_trains_what_a_loaded_one_does() -> None:
    blank = blank_transformer(BASE)
    real = {name.split(".")[0] for name, p in blank.named_parameters() if not p.is_meta}
    assert real == {"context_embedder_2"} and "_name_or_path" not in blank.config
    loaded = PackedVelocity(load_transformer(BASE, torch.float32, "cpu"))
    assert PackedVelocity(blank).trainable_names == loaded.trainable_names


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda state: state.pop("proj_out.bias"), "proj_out.bias is in no file"),
        (lambda state: state.update(more=torch.zeros(2)), "more is unknown to the model of config.json"),
        (lambda state: state.update({"proj_out.bias": torch.zeros(3)}), r"proj_out.bias is \(3,\), config.json makes"),
        (lambda state: state.pop("context_embedder_2.norm.weight"), "context_embedder_2.norm.weight is missing"),
    ],
)
def test_a_tensor_that_is_nowhere_or_too_much_is_named(tmp_path, change, rule: str) -> None:
    state = load_file(BASE / f"{STEM}.safetensors")
    change(state)
    with pytest.raises(ValueError, match=rule):
        load_transformer(rewrite(tmp_path / "changed", state), torch.float32, "cpu")


@pytest.mark.parametrize("path", [False, True])
def test_adapters_are_filled_as_adapt_makes_them(tmp_path, path: bool) -> None:
    """Through a model without storage, from the seed or from a file, as the learner loads."""
    from sage_ray.models.lora import PREFIX, adapter_values

    settings = LoraConfig(rank=4, alpha=8.0)
    wanted = PackedVelocity(load_transformer(BASE, torch.float32, "cpu"), torch.float32)
    adapt(wanted, settings, 5, dtype=torch.float32)
    if path:
        for name, p in wanted.named_parameters():
            if ".lora_" in name:
                torch.nn.init.normal_(p.data, generator=torch.Generator().manual_seed(len(name)))
        save_adapter(wanted.transformer, tmp_path)
        settings.path = str(tmp_path)
    model = PackedVelocity(blank_transformer(BASE), torch.float32)
    adapt(model, settings, 5, dtype=torch.float32)
    given = adapter_values(model, settings, 5)
    model.to("meta").to_empty(device="cpu")
    for p in model.parameters():
        p.data.fill_(float("nan"))
    fill(model, BASE, PREFIX, given)
    found = dict(model.named_parameters())
    assert found.keys() == dict(wanted.named_parameters()).keys() and len(given) > 100
    for name, p in wanted.named_parameters():
        assert torch.equal(found[name], p) and found[name].requires_grad == p.requires_grad, name


@pytest.mark.parametrize("lora", [0, 4])
def test_two_ranks_need_their_shares_and_less_than_one_file_more(tmp_path, lora: int) -> None:
    """Real processes, a random folder of 90 M parameters in six files; a whole model would be 361 MB in float32."""
    words = ["--sizes", "small", "--device", "cpu", "--lora", str(lora), "--folder", str(tmp_path / "transformer")]
    command = [sys.executable, "-m", "bench.load_memory", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=_environment())
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(line["rank"] for line in ranks) == [0, 1]
    for line in ranks:
        assert line["host_peak_above_share_bytes"] < line["largest_file_bytes"], line
    assert sum(line["share_bytes"] for line in ranks) > (2 if lora else 4) * 85e6


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
