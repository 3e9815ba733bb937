"""check: a complete folder passes; each missing, cut off or unsupported part is named with its rule."""

import json
from pathlib import Path

import pytest
import torch

from sage_ray.rewards import checkpoint
from sage_ray.rewards.videoalign import VideoAlign
from tests.rewards.golden import write_golden

PTH = "checkpoint-11352/model.pth"


def edit_json(file: Path, *path: str, value: object = None) -> None:
    """Set the value at a path of keys; None removes it."""
    content = json.loads(file.read_text())
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    file.write_text(json.dumps(content))


def refuses(folder: Path, *words: str) -> None:
    with pytest.raises(ValueError) as error:
        VideoAlign.check(folder)
    for word in words:
        assert word in str(error.value)


def test_complete_folder_passes(folder):
    VideoAlign.check(folder)


@pytest.mark.parametrize(
    "name", ["model_config.json", "prompt_template.txt", "checkpoint-11352/tokenizer/tokenizer.json", PTH]
)
def test_missing_file_is_named(folder, name):
    (folder / name).unlink()
    refuses(folder, str(folder), Path(name).name)


def test_missing_folder_and_checkpoint(folder, tmp_path):
    refuses(tmp_path / "nowhere", "nowhere", "is missing")
    refuses(folder / "model_config.json", "is a file")
    (folder / "checkpoint-11352").rename(folder / "checkpoint-last")
    refuses(folder, "holds no checkpoint-N")


@pytest.mark.parametrize("section", list(checkpoint.NEEDED))
def test_missing_section_or_key_is_named(folder, section):
    file = folder / "model_config.json"
    content = file.read_text()
    for key in checkpoint.NEEDED[section]:
        edit_json(file, section, key)
        refuses(folder, "model_config.json", f"{section}.{key}")
        file.write_text(content)
    edit_json(file, section)
    refuses(folder, f"section {section}")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.reward_token", "last"),
        ("model_config.output_dim", 2),
        ("model_config.torch_dtype", "float16"),
        ("data_config.prompt_template_type", "none"),
        ("data_config.fps", 0),
        ("data_config.max_frame_pixels", "many"),
        ("peft_lora_config.vision_lora", True),
        ("peft_lora_config.use_rslora", True),
        ("peft_lora_config.lora_namespan_exclude", ["lm_head"]),
        ("inference_config.VQ_std", -1.0),
        ("inference_config.TA_mean", None),
        ("inference_config.MQ_mean", "x"),
    ],
)
def test_unsupported_value_is_named(folder, path, value):
    edit_json(folder / "model_config.json", *path.split("."), value=value)
    refuses(folder, "model_config.json", path)


def test_json_must_be_valid(folder):
    (folder / "model_config.json").write_text("{")
    refuses(folder, "model_config.json", "must be readable JSON")
    (folder / "model_config.json").write_text("[]")
    refuses(folder, "must hold a JSON object")


def test_base_config_places(folder):
    name = "Qwen/Qwen2-VL-2B-Instruct"
    content = (folder / "base_config.json").read_text()
    (folder / "base_config.json").unlink()
    places = [folder.parent / name / "config.json", folder.parent / "Qwen2-VL-2B-Instruct" / "config.json"]
    refuses(folder, str(folder / "base_config.json"), *map(str, places))
    for place in places:
        place.parent.mkdir(parents=True)
        place.write_text(content)
        VideoAlign.check(folder)
        edit_json(place, "hidden_size")
        refuses(folder, str(place), "hidden_size")
        place.write_text(content)
        edit_json(place, "vision_config", "patch_size", value=16)
        refuses(folder, "vision_config.patch_size=16")
        place.unlink()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("<|VQ_reward|><|MQ_reward|><|TA_reward|>", "{text_prompt} once"),
        ("<|VQ_reward|><|MQ_reward|>{text_prompt}", "once each"),
        ("<|MQ_reward|><|VQ_reward|>{text_prompt}<|TA_reward|>", "in this order"),
        ("{x}<|VQ_reward|><|MQ_reward|>{text_prompt}<|TA_reward|>", "and no other"),
        ("{<|VQ_reward|><|MQ_reward|>{text_prompt}<|TA_reward|>", "format string"),
    ],
)
def test_template_rules(folder, text, rule):
    (folder / "prompt_template.txt").write_text(text)
    refuses(folder, "prompt_template.txt", rule)


def test_official_checkpoint_needs_the_official_template(folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "OFFICIAL_WEIGHTS_BYTES", (folder / PTH).stat().st_size)
    VideoAlign.check(folder)
    file = folder / "prompt_template.txt"
    file.write_text("\n".join(line.rstrip() for line in file.read_text().split("\n")))
    refuses(folder, "sha256", checkpoint.OFFICIAL_TEMPLATE_SHA256)


@pytest.mark.parametrize("name", ["model.pth", "model.safetensors"])
@pytest.mark.parametrize("keep", [0, 5, 1000, -1000, -1])
def test_cut_off_weights_are_found(tmp_path, name, keep):
    folder = write_golden(tmp_path / "VideoReward", weights_file=name)
    file = folder / "checkpoint-11352" / name
    file.write_bytes(file.read_bytes()[:keep])
    rule = {"model.pth": "cut off", "model.safetensors": "half-written"}[name]
    refuses(folder, str(file), "is empty" if keep == 0 else rule)


def test_tokenizer_without_reward_tokens(folder):
    file = folder / "checkpoint-11352" / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"] = content["added_tokens"][:-1]
    file.write_text(json.dumps(content))
    refuses(folder, "tokenizer.json", "<|TA_reward|>")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (None, "1 keys are missing, the first is base_model.model.rm_head.weight"),
        (torch.ones(2, 3), "rm_head.weight has shape [2, 3], must be"),
        (torch.ones(3, 64, dtype=torch.float64), "rm_head.weight is torch.float64, must be one of F32, BF16, F16"),
    ],
)
def test_tensors_are_compared_with_the_network_before_loading(folder, change, rule):
    state = torch.load(folder / PTH, weights_only=True)
    edited = {key: tensor for key, tensor in state.items() if not key.endswith("rm_head.weight")}
    if change is not None:
        edited["base_model.model.rm_head.weight"] = change
    torch.save(edited, folder / PTH)
    refuses(folder, str(folder / PTH), rule)


@pytest.mark.parametrize("entry", [["model_name_or_path", 3], ["model_name_or_path", ""]])
def test_a_base_without_a_name_is_refused(folder, entry):
    edit_json(folder / "model_config.json", "model_config", entry[0], value=entry[1])
    refuses(folder, "model_config.json", "must be a name")


def test_a_folder_that_is_still_written_is_refused(folder):
    refuses(folder.rename(folder.with_name("VideoReward.partial")), "half written")
