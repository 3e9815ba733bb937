"""What export writes, opened by plain diffusers, samples what our own sampler samples."""

import argparse
import os
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline, HunyuanVideo15Transformer3DModel
from diffusers.loaders import HunyuanVideoLoraLoaderMixin
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sage_ray.config_load import to_yaml
from sage_ray.export import add_arguments, export, run
from sage_ray.json_object import read_object
from sage_ray.models.condition import condition_tensors
from sage_ray.models.hunyuan_video import HunyuanVideo, scheduler_shift
from sage_ray.models.lora import FILE, merged_state
from sage_ray.models.packed_velocity import PackedVelocity, guided_velocity
from sage_ray.models.policy_folder import WEIGHTS
from sage_ray.sampler import generate
from sage_ray.schedule import sigma_grid
from sage_ray.transition import coefficients
from tests.conftest import POLICY
from tests.models.test_lora import BF16, FP32, adapted
from tests.models.test_policy_folder import changed, checkpoint, moved, same_bits
from tests.small import small_config

PROMPTS = ["a small red circle moves left slowly on a gray background", 'a large square says "hello"']
CAPTIONS = [PROMPTS[0], "a large blue square moves up quickly on a gray background"]
STEPS = 4


def opened(folder: Path, kind: type[HunyuanVideo15Pipeline] = HunyuanVideo15Pipeline) -> HunyuanVideo15Pipeline:
    pipeline = kind.from_pretrained(folder, torch_dtype=FP32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def noise() -> torch.Tensor:
    return torch.randn(2, 8, 3, 4, 4, generator=torch.Generator().manual_seed(5))


def plain(pipeline: HunyuanVideo15Pipeline, prompts: list[str], scale: float) -> torch.Tensor:
    """The pipeline's own call: its padded text, its scheduler, its guider, the stock forward."""
    pipeline.guider = pipeline.guider.new(guidance_scale=scale)
    sizes = {"height": 32, "width": 32, "num_frames": 9, "num_inference_steps": STEPS}
    with torch.no_grad():
        return pipeline(prompt=prompts, latents=noise(), output_type="latent", **sizes).frames


def ours(policy: HunyuanVideo, model: PackedVelocity, prompts: list[str], scale: float) -> torch.Tensor:
    """The sampler that rollout workers use, without noise; `policy` only encodes."""
    conditions = condition_tensors([policy.encode_prompt(prompt) for prompt in prompts], "cpu")
    negatives = condition_tensors([policy.encode_prompt("")], "cpu")
    coefs = coefficients("ode", sigma_grid(STEPS, scheduler_shift(POLICY)), eta=0.0)

    def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
        return guided_velocity(model, x, [sigma], conditions, negatives, scale)

    return generate(velocity, noise(), coefs, lambda step: pytest.fail("an ODE step asked for noise")).latents


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.fixture(scope="module")
def random_policy(tmp_path_factory) -> tuple[Path, Path, Path]:
    """(base, trained transformer, exported pipeline) of another model than the shipped one: random, two refiner
    layers, byT5 not zero."""
    folder, pipeline = tmp_path_factory.mktemp("random"), opened(POLICY)
    config = read_object(POLICY / "transformer" / "config.json")
    torch.manual_seed(11)
    model = HunyuanVideo15Transformer3DModel.from_config(config | {"num_layers": 2, "num_refiner_layers": 2})
    pipeline.transformer = model
    pipeline.save_pretrained(folder / "base")
    source = checkpoint(folder / "version_000007", moved(model, 0.02))
    out = export(source, folder / "base", folder / "out", form=None, dtype=FP32)
    return folder / "base", source / "transformer", out


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_a_random_policy_s_pipeline_equals_our_sampling(policy, random_policy, scale) -> None:
    base, trained, exported = random_policy
    model = PackedVelocity(HunyuanVideo15Transformer3DModel.from_pretrained(trained, torch_dtype=FP32))
    expected = ours(policy, model, PROMPTS, scale)
    assert apart(plain(opened(exported), PROMPTS, scale), expected) < 1e-5
    assert apart(plain(opened(base), PROMPTS, scale), expected) > 0.1


@pytest.mark.parametrize(("scale", "relative"), [(1.0, False), (2.0, False), (6.0, True)])
def test_the_shipped_policy_s_pipeline_equals_our_sampling(policy, tmp_path, scale, relative) -> None:
    """It is trained without guidance: 6 drives latents to several times their size, and their rounding with them."""
    expected = ours(policy, PackedVelocity(changed(scale=0.002)), CAPTIONS, scale)
    source = checkpoint(tmp_path / "version_000007", changed(scale=0.002))
    out = export(source, POLICY, tmp_path / "out", form="pipeline", dtype=FP32)
    largest = float(expected.abs().max())
    assert (largest > 5) == relative
    assert apart(plain(opened(out), CAPTIONS, scale), expected) < 1e-5 * (largest if relative else 1)
    assert apart(ours(policy, policy.velocity, CAPTIONS, scale), expected) > 0.05


class WithLoader(HunyuanVideoLoraLoaderMixin, HunyuanVideo15Pipeline):
    """diffusers' loader of the older HunyuanVideo takes our file too."""


def with_adapter(folder: Path) -> HunyuanVideo15Pipeline:
    pipeline = opened(POLICY)
    assert not hasattr(pipeline, "load_lora_weights")  # once it has, docs/export.md and the model card can say so
    pipeline.transformer.load_lora_adapter(folder, weight_name=FILE)
    return pipeline


def with_mixin(folder: Path) -> HunyuanVideo15Pipeline:
    pipeline = opened(POLICY, WithLoader)
    pipeline.load_lora_weights(folder, weight_name=FILE)
    return pipeline


def with_transformer(folder: Path) -> HunyuanVideo15Pipeline:
    pipeline = opened(POLICY)
    pipeline.transformer = HunyuanVideo15Transformer3DModel.from_pretrained(folder, torch_dtype=FP32)
    return pipeline


LOADERS = [(None, with_adapter), ("lora", with_mixin), ("pipeline", opened), ("transformer", with_transformer)]


@pytest.mark.parametrize(("form", "load"), LOADERS)
def test_an_adapter_in_every_form_equals_our_sampling(policy, tmp_path, form, load) -> None:
    live = adapted(rank=4, alpha=6.0)
    out = export(checkpoint(tmp_path / "lora", live.transformer), POLICY, tmp_path / "out", form=form, dtype=FP32)
    expected = ours(policy, live, CAPTIONS, 1.0)
    assert apart(plain(load(out), CAPTIONS, 1.0), expected) < 1e-5
    assert apart(ours(policy, policy.velocity, CAPTIONS, 1.0), expected) > 0.05


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_weights_come_back_bit_by_bit(tmp_path, dtype) -> None:
    full, live = changed(), adapted().transformer
    sources = (checkpoint(tmp_path / "full", full), checkpoint(tmp_path / "lora", live))
    transformer = export(sources[0], POLICY, tmp_path / "1", form="transformer", dtype=dtype)
    merged = export(sources[1], POLICY, tmp_path / "2", form="pipeline", dtype=dtype) / "transformer"
    for folder, state in ((transformer, full.state_dict()), (merged, merged_state(live))):
        assert same_bits(load_file(folder / WEIGHTS), {name: tensor.to(dtype) for name, tensor in state.items()})
        assert "_name_or_path" not in (folder / "config.json").read_text()
    lora = export(sources[1], POLICY, tmp_path / "3", form="lora", dtype=dtype) / FILE
    stored = sources[1] / "adapter" / FILE
    assert same_bits(load_file(lora), {name: tensor.to(dtype) for name, tensor in load_file(stored).items()})
    with safe_open(lora, framework="pt") as a, safe_open(stored, framework="pt") as b:
        assert a.metadata() == b.metadata()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_rest_is_the_base_s_and_no_change_of_the_export_reaches_it(tmp_path) -> None:
    """The base as a Hugging Face cache has it: every file a relative link into blobs/, in models--OWNER--NAME."""
    blobs, base = tmp_path / "models--tiny--video" / "blobs", tmp_path / "models--tiny--video" / "snapshots" / "a1b2"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in POLICY.rglob("*") if path.is_file())):
        shutil.copy(path, blobs / str(number))
        link = base / path.relative_to(POLICY)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    left_out = ("README.md", ".gitattributes", "transformer/notes.txt")
    for name in left_out:
        (base / name).write_text("the base's")
    before = files(base)
    out = export(checkpoint(tmp_path / "full", changed()), base, tmp_path / "out", form=None, dtype=FP32)
    kept = {name: data for name, data in before.items() if name not in left_out and "transformer/" not in name}
    found = files(out)
    assert kept.items() <= found.items()
    assert found.keys() - kept.keys() == {"README.md", "transformer/config.json", f"transformer/{WEIGHTS}"}
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert b"| base | tiny/video |" in found["README.md"]
    assert os.path.samefile(out / "vae" / WEIGHTS, base / "vae" / WEIGHTS)
    save_file({"a": torch.ones(3)}, out / "transformer" / WEIGHTS)
    for path in out.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors":
            with path.open("ab") as stream:  # in place, as an editor may write
                stream.write(b"edited")
    opened(POLICY).vae.save_pretrained(out / "vae")
    assert files(base) == before


def test_the_card_says_what_it_is_and_not_where_it_was_made(random_policy, tmp_path) -> None:
    card = (random_policy[2] / "README.md").read_text()
    for row in ("base | base", "form | pipeline", "checkpoint | version_000007/transformer", "policy version | 7"):
        assert f"| {row} |" in card
    assert "| dtype of the trained weights | float32 |" in card and str(random_policy[0].parent) not in card
    source = checkpoint(tmp_path / "lora", adapted().transformer)
    card = (export(source, POLICY, tmp_path / "1", form="pipeline", dtype=BF16) / "README.md").read_text()
    assert "| form | pipeline, adapter merged |" in card and "torch_dtype=torch.bfloat16" in card
    card = (export(source, POLICY, tmp_path / "2", form=None, dtype=FP32) / "README.md").read_text()
    assert "| form | lora |" in card and f'load_lora_adapter("this folder", weight_name="{FILE}")' in card


def test_what_cannot_be_exported_is_named_and_nothing_is_written(random_policy, tmp_path) -> None:
    full, lora = checkpoint(tmp_path / "full", changed()), checkpoint(tmp_path / "lora", adapted().transformer)
    taken, a_file = tmp_path / "taken", tmp_path / "file"
    taken.mkdir()
    (taken / "kept").write_text("mine")
    a_file.write_text("mine")
    incomplete, other = (shutil.copytree(POLICY, tmp_path / name) for name in ("incomplete", "other"))
    (incomplete / "vae" / WEIGHTS).unlink()
    config = other / "transformer" / "config.json"
    config.write_text(config.read_text().replace('"target_size": 640', '"target_size": 960'))
    before, new = files(tmp_path), tmp_path / "new"
    for base, output, form, rule in (
        (POLICY, taken, None, "is there already"),
        (POLICY, a_file / "new", None, "is a file"),
        (POLICY, incomplete / "vae" / "new", "lora", "only an adapter can be written as LoRA"),
        (incomplete, new, None, "vae/diffusion_pytorch_model.safetensors: the file does not exist"),
        (other, new, None, "config.json: target_size=640"),
        (other, other / "vae" / "new", None, "must not lie inside the base"),
        (POLICY, new, "onnx", "must be one of pipeline, transformer, lora"),
    ):
        with pytest.raises(ValueError, match=rule):
            export(full, base, output, form=form, dtype=FP32)
    with pytest.raises(ValueError, match=r"transformer_blocks\.2\..*no such layer"):
        export(lora, random_policy[0], new, form=None, dtype=FP32)
    assert files(tmp_path) == before and not new.exists()


def test_a_write_that_fails_leaves_nothing_behind(tmp_path) -> None:
    base, source = tmp_path / "base", checkpoint(tmp_path / "full", changed())
    shutil.copytree(POLICY, base)
    (base / "vae" / "extra.json").symlink_to("nowhere")
    with pytest.raises(shutil.Error):
        export(source, base, tmp_path / "made" / "out", form=None, dtype=FP32)
    assert list((tmp_path / "made").iterdir()) == []


def test_the_command_finds_the_base_in_the_run_s_config(tmp_path) -> None:
    source = checkpoint(tmp_path / "run" / "checkpoints" / "version_000007", adapted().transformer)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = ["--checkpoint", str(source), "--output", str(tmp_path / "a"), "--dtype", "bfloat16"]
    with pytest.raises(ValueError, match="--base: must be given"):
        run(parser.parse_args(arguments))
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(small_config(tmp_path)))
    assert run(parser.parse_args(arguments)) == tmp_path / "a"
    assert {tensor.dtype for tensor in load_file(tmp_path / "a" / FILE).values()} == {BF16}
    arguments[1:4:2] = [str(source / "adapter"), str(tmp_path / "b")]
    assert run(parser.parse_args([*arguments, "--form", "transformer"])) == tmp_path / "b"
    assert (tmp_path / "b" / WEIGHTS).is_file()
