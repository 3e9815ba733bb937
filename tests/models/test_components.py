"""What a component's folder must hold, on copies of the small world; each rule is broken once with its message."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5EncoderModel

from sage_ray.checks import problems
from sage_ray.config import Config
from sage_ray.models.components import COMPONENTS, check_component
from sage_ray.models.pipeline_check import check_components
from tests.conftest import POLICY, REWARD

SHARED, TIED = COMPONENTS["text_encoder_2"].tied


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(POLICY, tmp_path / "policy"))


def edit_json(file: Path, **change: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def edit_tensors(folder: Path, name: str, **change) -> Path:
    """A component with some tensors replaced, or left out where None."""
    file = folder / name / f"{COMPONENTS[name].stem}.safetensors"
    state = load_file(file) | change
    save_file({key: value for key, value in state.items() if value is not None}, file)
    return file


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        check_components(folder)
    return str(caught.value)


@pytest.mark.parametrize("name", COMPONENTS)
def test_the_small_world_passes_and_each_rule_about_tensors_is_named(folder, name) -> None:
    files = check_component(folder / name, name)
    assert files.only_dtype() == "BF16"
    kept = files.main.read_bytes()
    key, shape = next((key, shape) for key, shape in files.shapes.items() if len(shape) == 1)
    for change, rule in (
        (None, f"{key} is missing, config.json makes it {shape}"),
        (torch.ones(3), f"{key} is (3,), config.json makes it {shape}"),
        (torch.ones(shape), f"{key} is F32"),
    ):
        file = edit_tensors(folder, name, **{key: change})
        assert rule in refusal(folder) and str(file.parent) in refusal(folder)
        file.write_bytes(kept)
    edit_tensors(folder, name, more=torch.ones(2, dtype=torch.bfloat16))
    assert "more is (2,), config.json makes it no such tensor" in refusal(folder)


@pytest.mark.parametrize(
    ("file", "change", "rule"),
    [
        ("transformer/config.json", {"num_layers": 10**9}, "num_layers=1000000000 must be an int, at most the 183"),
        ("transformer/config.json", {"rope_theta": "x"}, "rope_theta='x' must be like 256.0"),
        ("vae/config.json", {"scaling_factor": None}, "scaling_factor=None must be like 1.03682"),
        ("vae/config.json", {"_class_name": "AutoencoderKL"}, "_class_name is 'AutoencoderKL', must be"),
        ("text_encoder/config.json", {"model_type": "llama"}, "model_type is 'llama', must be qwen2_5_vl_text or"),
        ("text_encoder/config.json", {"quantization_config": {"a": 1}}, "quantization_config is not supported"),
        ("text_encoder/config.json", {"hidden_size": "x"}, "makes no Qwen2_5_VLTextModel"),
        ("model_index.json", {"vae": ["diffusers", "AutoencoderKL"]}, "vae is ['diffusers', 'AutoencoderKL'], must be"),
        ("model_index.json", {"image_encoder": ["a", "b"]}, "image_encoder is no component"),
        ("model_index.json", {"guider": ["diffusers", "UNet2DModel"]}, "must be a guider of diffusers"),
        ("guider/guider_config.json", {"start": 7.0}, "makes no ClassifierFreeGuidance"),
        ("scheduler/scheduler_config.json", {"num_train_timesteps": "x"}, "makes no FlowMatchEulerDiscreteScheduler"),
        (
            "text_encoder_2/config.json",
            {"vocab_size": 300},
            "shared.weight is (384, 16), config.json makes it (300, 16)",
        ),
    ],
)
def test_each_rule_about_settings_is_named(folder, file, change, rule) -> None:
    edit_json(folder / file, **change)
    assert rule in refusal(folder) and str(folder / file).rsplit("/", 1)[0] in refusal(folder)


def test_the_embedding_of_byt5_may_go_by_either_name_and_both_must_agree(folder) -> None:
    where = folder / "text_encoder_2"
    embedding = load_file(where / "model.safetensors")[SHARED]
    for change in ({TIED: embedding}, {SHARED: None, TIED: embedding}):
        edit_tensors(folder, "text_encoder_2", **change)
        check_components(folder)
        assert torch.equal(T5EncoderModel.from_pretrained(where).shared.weight, embedding)
    edit_tensors(folder, "text_encoder_2", **{SHARED: embedding + 1})
    assert f"{SHARED} and {TIED} must be equal" in refusal(folder)
    edit_tensors(folder, "text_encoder_2", **{SHARED: None, TIED: None})
    assert f"{SHARED} is missing" in refusal(folder)


def test_tokenizers_are_made_and_prompts_go_through_their_template(folder) -> None:
    template = folder / "tokenizer" / "chat_template.jinja"
    for text, rule in (("{% for", "cannot be applied"), ("nothing", "leaves out the prompt")):
        template.write_text(text)
        assert f"{template}: " in refusal(folder) and rule in refusal(folder)
    template.unlink()
    assert f"{template}: the file does not exist" in refusal(folder)
    (folder / "tokenizer" / "tokenizer.json").unlink()
    assert f"{folder / 'tokenizer' / 'tokenizer.json'}: the file does not exist" in refusal(folder)


def test_an_adapter_beside_an_encoder_is_refused(folder) -> None:
    (folder / "text_encoder" / "adapter_config.json").write_text("{}")
    assert "adapter_config.json: must not be there" in refusal(folder)


def test_a_policy_that_cannot_be_loaded_is_one_problem(folder, tmp_path) -> None:
    config = Config(output_dir=str(tmp_path / "run"))
    config.model.path, config.lora.targets, config.lora.rank = str(folder), ["to_q"], 2
    config.reward.path, config.data.prompts = str(REWARD), [str(POLICY.parent / "prompts_train.txt")]
    config.data.num_prompts, config.evaluation.num_prompts = 1, 0
    config.sampling.num_frames, config.sampling.height, config.sampling.width = 9, 32, 32
    assert problems(config) == []
    file = folder / "scheduler" / "scheduler_config.json"
    file.unlink()
    assert problems(config) == [f"model.path: {file}: the file does not exist"]
    shutil.rmtree(folder)
    assert len(problems(config)) == 1
