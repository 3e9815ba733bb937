"""`plan` says in a line what each kind of folder is, what it lacks and which command helps."""

import json
import shutil

import pytest

from sage_ray.folder_report import describe_policy, describe_reward
from sage_ray.models.official.layout import recognise
from tests.conftest import POLICY, REWARD
from tests.models.test_lora import adapted
from tests.models.test_policy_folder import changed, checkpoint

FETCHED = "HunyuanVideo-1.5-Diffusers-480p_t2v"


def test_what_can_be_used_is_named_with_its_size() -> None:
    assert describe_policy(POLICY) == (
        "HunyuanVideo15Pipeline, 5.1 million parameters in bfloat16 (encoders and VAE 2.0 million), text-to-video"
    )
    assert describe_reward(REWARD) == "VideoAlign, checkpoint-1, 0.4 million parameters, trained in bfloat16"


@pytest.mark.parametrize("make", [False, True])
def test_missing_and_empty_folders_name_the_download(tmp_path, make: bool) -> None:
    is_now = "is empty" if make else "is not there"
    for name, what, describe in ((FETCHED, "policy", describe_policy), ("VideoReward", "reward", describe_reward)):
        folder = tmp_path / name
        if make:
            folder.mkdir()
        command = f"python launch.py fetch {what} --to {tmp_path}"
        assert describe(folder) == f"{folder} {is_now}; get it: {command}"
        other = describe(tmp_path / "mine")
        key = "model.path" if what == "policy" else "reward.path"
        assert other == f"{tmp_path / 'mine'} is not there; get it: {command}, then {key}={folder}"
    seven = tmp_path / FETCHED.replace("480p", "720p")
    assert describe_policy(seven).endswith(f"fetch policy --to {tmp_path} --version 720p_t2v")


def test_what_lacks_files_names_them(tmp_path) -> None:
    for name, how in (
        (FETCHED, f"get them: python launch.py fetch policy --to {tmp_path}"),
        ("mine", "copy them from"),
    ):
        folder = shutil.copytree(POLICY, tmp_path / name)
        (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
        found = describe_policy(folder)
        assert "HunyuanVideo15Pipeline without vae/diffusion_pytorch_model.safetensors" in found and how in found
    reward = shutil.copytree(REWARD, tmp_path / "VideoReward")
    (reward / "prompt_template.txt").unlink()
    assert describe_reward(reward) == (
        f"VideoAlign without prompt_template.txt; get them: python launch.py fetch reward --to {tmp_path}"
    )


def test_the_official_layout_names_the_conversion(tmp_path) -> None:
    ckpts = tmp_path / "ckpts"
    (ckpts / "transformer" / "480p_t2v").mkdir(parents=True)
    config = ckpts / "transformer" / "480p_t2v" / "config.json"
    config.write_text(json.dumps({"_class_name": "HunyuanVideo_1_5_DiffusionTransformer"}))
    found = describe_policy(ckpts)
    assert "official layout (480p_t2v) without transformer/480p_t2v/diffusion_pytorch_model.safetensors" in found
    assert f"fetch policy --layout official --to {tmp_path}" in found
    for file in recognise(ckpts).missing:
        (ckpts / file).parent.mkdir(parents=True, exist_ok=True)
        (ckpts / file).touch()
    target = f"{ckpts}-diffusers"
    assert describe_policy(ckpts) == (
        f"official layout; convert it: python launch.py convert {ckpts} {target}, then model.path={target}"
    )


def test_other_folders_say_where_they_belong(tmp_path) -> None:
    full, lora = checkpoint(tmp_path / "full", changed()), checkpoint(tmp_path / "lora", adapted(rank=2).transformer)
    assert describe_policy(full).startswith("a transformer alone (text-to-video)")
    assert f"launch.py export --checkpoint {full}" in describe_policy(full)
    assert describe_policy(full / "transformer").startswith("a transformer alone")
    for given in (lora, lora / "adapter"):
        found = describe_policy(given)
        assert found.startswith("a LoRA adapter; model.path is its base") and "lora.rank=2" in found
    assert "it goes to reward.path" in describe_policy(REWARD)
    assert "it goes to model.path" in describe_reward(POLICY)
    assert describe_policy(POLICY / "vae").startswith("AutoencoderKLHunyuanVideo15 alone")
    assert describe_reward(POLICY.parent / "clip").startswith("a CLIP model; it goes to reward.extra")
    assert describe_policy(POLICY / "model_index.json").endswith("is a file; it must be a folder")
    (tmp_path / "wan").mkdir()
    (tmp_path / "wan" / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    assert "WanPipeline of diffusers" in describe_policy(tmp_path / "wan")
    assert "nothing known, holds full" in describe_policy(tmp_path)
    assert "no VideoAlign folder" in describe_reward(tmp_path)


def test_half_written_and_unreadable_folders_do_not_end_the_plan(tmp_path) -> None:
    folder = shutil.copytree(POLICY, tmp_path / "x.partial")
    assert "half written" in describe_policy(folder)
    folder = folder.rename(tmp_path / "x")
    (folder / "model_index.json").write_text("{")
    assert "cannot be told" in describe_policy(folder) and "model_index.json" in describe_policy(folder)
