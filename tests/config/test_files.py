"""config_files: a complete checkpoint passes; each missing or half-written part is named with its rule."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sage_ray.checks import problems
from sage_ray.config import Config, ConfigError
from sage_ray.config_files import CONFIG_FILES, PIPELINE, WEIGHTS, check_model, check_output_dir, check_pipeline
from tests.conftest import POLICY


def write_json(file: Path, content: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


@pytest.fixture
def pipeline(tmp_path) -> Path:
    """A HunyuanVideo15Pipeline directory by its files alone; the text encoder is sharded, the others are not."""
    folder = tmp_path / "policy"
    write_json(folder / "model_index.json", {"_class_name": PIPELINE} | {name: ["lib", "C"] for name in CONFIG_FILES})
    for component, file in CONFIG_FILES.items():
        write_json(folder / component / file, {"temporal_compression_ratio": 4, "spatial_compression_ratio": 16})
    for component, file in WEIGHTS.items():
        save_file({"a": np.ones((3, 5), np.float32), "b": np.ones(7, np.float16)}, folder / component / file)
    encoder = folder / "text_encoder"
    (encoder / "model.safetensors").unlink()
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for name, shard in shards.items():
        save_file({name: np.ones(4, np.float32)}, encoder / shard, metadata={"format": "pt"})
    write_json(encoder / "model.safetensors.index.json", {"metadata": {}, "weight_map": shards})
    return folder


@pytest.fixture
def small_world(tmp_path) -> Path:
    """A copy of the shipped policy, whose tensors are its classes'."""
    return Path(shutil.copytree(POLICY, tmp_path / "small_world"))


@pytest.fixture
def config(tmp_path, small_world) -> Config:
    config = Config(output_dir=str(tmp_path / "run"))
    config.model.path = str(small_world)
    config.sampling.num_frames, config.sampling.height, config.sampling.width = 9, 32, 32
    return config


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_pipeline(folder)
    return str(caught.value)


def test_complete(config):
    check_model(config)


@pytest.mark.parametrize(("component", "file"), CONFIG_FILES.items())
def test_missing_component_and_missing_config(pipeline, component, file):
    (pipeline / component / file).unlink()
    assert refusal(pipeline) == f"model.path: {pipeline / component / file}: the file does not exist"
    shutil.rmtree(pipeline / component)
    assert refusal(pipeline) == f"model.path: {pipeline / component / file}: the file does not exist"
    index = json.loads((pipeline / "model_index.json").read_text())
    del index[component]
    write_json(pipeline / "model_index.json", index)
    assert refusal(pipeline) == f"model.path: {pipeline / 'model_index.json'}: must list the component {component}"


def test_no_directory(tmp_path):
    rule = f"must be a directory that holds a {PIPELINE}"
    assert refusal(tmp_path / "none") == f"model.path={str(tmp_path / 'none')!r}: {rule}"


def test_other_pipeline(pipeline):
    write_json(pipeline / "model_index.json", {"_class_name": "WanPipeline"})
    rule = f"_class_name must be {PIPELINE}, is 'WanPipeline'"
    assert refusal(pipeline) == f"model.path: {pipeline / 'model_index.json'}: {rule}"


@pytest.mark.parametrize(("text", "rule"), [("{", "must be readable JSON: "), ("[]", "must hold a JSON object")])
def test_broken_json(pipeline, text, rule):
    file = pipeline / "vae" / "config.json"
    file.write_text(text)
    assert refusal(pipeline).startswith(f"model.path: {file}: {rule}")


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder_2"])
def test_missing_weights(pipeline, component):
    file = pipeline / component / WEIGHTS[component]
    file.unlink()
    assert refusal(pipeline) == f"model.path: {file}: the file does not exist"


def test_weights_cut_at_every_kind_of_place(pipeline):
    file = pipeline / "transformer" / WEIGHTS["transformer"]
    whole = file.read_bytes()
    for length in (0, 5, 8, 40):
        file.write_bytes(whole[:length])
        rule = f"half-written: {length} bytes end inside the safetensors header"
        assert refusal(pipeline) == f"model.path: {file}: {rule}"
    for content in (whole[:-1], whole + b"x"):
        file.write_bytes(content)
        rule = f"half-written: {len(content)} bytes, its header says {len(whole)}"
        assert refusal(pipeline) == f"model.path: {file}: {rule}"


@pytest.mark.parametrize("header", [b"[]", b"{", b'{"a": {}}', b'{"a": {"data_offsets": [0]}}', b"\xff"])
def test_unreadable_header(pipeline, header):
    file = pipeline / "vae" / WEIGHTS["vae"]
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    assert refusal(pipeline).startswith(f"model.path: {file}: the safetensors header is not readable: ")


def test_missing_shard_half_shard_and_shard_without_its_tensor(pipeline):
    shard = pipeline / "text_encoder" / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    assert "half-written" in refusal(pipeline) and str(shard) in refusal(pipeline)
    save_file({"c": np.ones(1)}, shard)
    assert refusal(pipeline) == f"model.path: {shard}: must hold b, as model.safetensors.index.json says"
    shard.unlink()
    assert refusal(pipeline) == f"model.path: {shard}: the file does not exist"


def test_index_without_weight_map(pipeline):
    file = pipeline / "text_encoder" / "model.safetensors.index.json"
    write_json(file, {})
    assert refusal(pipeline) == f"model.path: {file}: must hold a weight_map of tensors and shards"


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("num_frames", 80, "num_frames - 1 must be a multiple of 4, the temporal ratio in "),
        ("height", 470, "must be a multiple of 8, the spatial ratio in "),
        ("width", 841, "must be a multiple of 8, the spatial ratio in "),
    ],
)
def test_video_size_must_suit_the_vae(config, small_world, key, value, rule):
    setattr(config.sampling, key, value)
    with pytest.raises(ConfigError) as caught:
        check_model(config)
    assert str(caught.value) == f"sampling.{key}={value}: {rule}{small_world / 'vae' / 'config.json'}"


def test_vae_without_ratio(config, small_world):
    file = small_world / "vae" / "config.json"
    content = json.loads(file.read_text())
    write_json(file, content | {"temporal_compression_ratio": 0})
    with pytest.raises(ConfigError, match=f"{file}: makes no AutoencoderKLHunyuanVideo15"):
        check_model(config)
    del content["temporal_compression_ratio"]
    write_json(file, content)
    with pytest.raises(ConfigError, match=f"{file}: key temporal_compression_ratio is missing"):
        check_model(config)


@pytest.mark.parametrize("key", ["learner.sp_size", "rollout.sp_size"])
def test_a_sequence_parallel_group_divides_the_heads(config, key):
    section, name = key.split(".")
    setattr(getattr(config, section), name, 3)
    expected = f"{key}=3: must divide num_attention_heads=4 of {config.model.path}/transformer/config.json"
    assert expected in problems(config)
    setattr(getattr(config, section), name, 4)
    assert not any("num_attention_heads" in fault for fault in problems(config))


def test_output_dir(tmp_path):
    check_output_dir(tmp_path / "new")
    check_output_dir(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError) as caught:
        check_output_dir(tmp_path)
    assert str(caught.value) == f"output_dir={str(tmp_path)!r}: must be new or empty, holds notes.txt"
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError) as caught:
        check_output_dir(tmp_path)
    assert str(caught.value) == f"output_dir={str(tmp_path)!r}: must be new or empty, holds another run (config.yaml)"
    with pytest.raises(ConfigError, match="must be a new or empty folder, is a file"):
        check_output_dir(tmp_path / "config.yaml")
