"""Whole folders in both layouts: what is recognised, what a conversion keeps, what is refused and leaves nothing."""

import argparse
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    ByT5Tokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from sage_ray.config_files import check_pipeline
from sage_ray.models.official import layout as official_layout
from sage_ray.models.official.config import scheduler_to_official, transformer_to_official, vae_to_official
from sage_ray.models.official.layout import convert, recognise
from sage_ray.models.official.text import COLORS, FONTS, GLYPH, glyph_tokens
from sage_ray.models.policy_folder import find_policy
from sage_ray.models.tensor_files import write_tensors
from sage_ray.shapes.pipeline import word_tokenizer
from sage_ray.tensor_files import TensorFiles
from tests.conftest import POLICY
from tests.models.test_official_keys import SMALL, SMALL_VAE, blank, random_state, same_bits

STEM = "diffusion_pytorch_model"
LLM = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 12,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]},
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "vision_config": {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 12},
}
"""In the published form: the language model's sizes at the top."""
BYT5 = {"d_model": 10, "d_kv": 5, "d_ff": 12, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}


def write_json(file: Path, content: dict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def edit_json(file: Path, **changes) -> None:
    write_json(file, {**json.loads(file.read_text()), **changes})


@pytest.fixture(scope="module")
def official(tmp_path_factory) -> Path:
    """A small random folder as the official downloads leave it; the transformer in shards."""
    from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("source") / "ckpts"
    for cls, settings, part, to_official, dtype in (
        (
            HunyuanVideo15Transformer3DModel,
            {**SMALL, "task_type": "t2v"},
            "transformer/480p_t2v",
            transformer_to_official,
            torch.bfloat16,
        ),
        (AutoencoderKLHunyuanVideo15, SMALL_VAE, "vae", vae_to_official, torch.float32),
    ):
        config = json.loads(json.dumps(blank(cls, **settings)[1]))
        state = random_state(config, "official", dtype=dtype)
        pieces = [(tensor.nbytes, lambda key=key, tensor=tensor: {key: tensor}) for key, tensor in state.items()]
        write_tensors(folder / part, STEM, pieces, 6_000_000)
        write_json(folder / part / "config.json", to_official(config, ""))
    assert len(list(folder.glob("transformer/480p_t2v/*.safetensors"))) > 1
    write_json(folder / "scheduler/scheduler_config.json", scheduler_to_official(5.0))
    write_text_encoders(folder / "text_encoder")
    (folder / "vision_encoder" / "siglip").mkdir(parents=True)
    (folder / "VideoReward").mkdir()
    return folder


def write_text_encoders(folder: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.save_pretrained(folder / "llm")
    llm = {**LLM, "vocab_size": len(tokenizer)}
    Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**llm)).bfloat16().save_pretrained(folder / "llm")
    write_json(folder / "llm/config.json", {**llm, "architectures": ["Qwen2_5_VLForConditionalGeneration"]})
    byt5 = ByT5Tokenizer()
    byt5.save_pretrained(folder / "byt5-small")
    model = T5ForConditionalGeneration(T5Config(**BYT5, vocab_size=len(byt5), feed_forward_proj="gated-gelu"))
    model.save_pretrained(folder / "byt5-small")
    write_json(folder / COLORS, {"white": 0, "black": 1})
    write_json(folder / FONTS, {"en-Lato": 0, "cn-Song": 1, "en-Mono": 2})
    encoder = glyph_encoder(folder)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter)
    (folder / GLYPH).parent.mkdir()
    torch.save(encoder.state_dict(), folder / GLYPH)


def glyph_encoder(folder: Path) -> torch.nn.Module:
    """As the official program builds it: byT5's encoder, room for colours and fonts, then (if there) its weights."""
    encoder = T5ForConditionalGeneration.from_pretrained(folder / "byt5-small").get_encoder()
    tokenizer = ByT5Tokenizer.from_pretrained(folder / "byt5-small")
    tokenizer.add_tokens(glyph_tokens(folder), special_tokens=True)
    encoder.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    if (folder / GLYPH).exists():
        encoder.load_state_dict(torch.load(folder / GLYPH, weights_only=True))
    return encoder.eval()


@pytest.fixture(scope="module")
def pipeline(official, tmp_path_factory) -> Path:
    return convert(official, tmp_path_factory.mktemp("converted") / "pipeline", "diffusers")


def state_of(folder: Path, stem: str = STEM) -> dict[str, torch.Tensor]:
    files = TensorFiles(folder, stem)
    return {key: files.read(key) for key in files.shapes}


def settings_of(file: Path) -> dict:
    return {key: value for key, value in json.loads(file.read_text()).items() if not key.startswith("_")}


def test_layouts_are_recognised_with_what_they_lack(official, pipeline, tmp_path) -> None:
    assert recognise(official) == official_layout.Layout("official", (), ("480p_t2v",))
    assert recognise(pipeline).kind == recognise(POLICY).kind == "diffusers"
    assert recognise(pipeline).missing == recognise(POLICY).missing == ()
    assert recognise(tmp_path).kind == "neither" and "model_index.json" in recognise(tmp_path).missing[0]
    write_json(tmp_path / "model_index.json", {"_class_name": "HunyuanVideo15Pipeline"})
    assert "transformer/config.json" in recognise(tmp_path).missing
    copy = shutil.copytree(official, tmp_path / "ckpts")
    (copy / "text_encoder" / GLYPH).unlink()
    (copy / "vision_encoder/siglip").rmdir()
    assert recognise(copy).missing == (f"text_encoder/{GLYPH}", "vision_encoder/siglip")


def test_official_to_diffusers_to_official_changes_no_bit(official, pipeline, tmp_path) -> None:
    back = convert(pipeline, tmp_path / "back", "official")
    for part in ("transformer/480p_t2v", "vae"):
        assert same_bits(state_of(back / part), state_of(official / part))
        assert settings_of(back / part / "config.json") == settings_of(official / part / "config.json")
    assert settings_of(back / "scheduler/scheduler_config.json") == settings_of(
        official / "scheduler/scheduler_config.json"
    )
    found, expected = (torch.load(folder / "text_encoder" / GLYPH, weights_only=True) for folder in (back, official))
    assert same_bits(found, expected)
    whole, language = state_of(official / "text_encoder/llm", "model"), state_of(back / "text_encoder/llm", "model")
    assert same_bits(language, {k.removeprefix("model."): v for k, v in whole.items() if k.startswith("model.")})
    downloads = ("text_encoder/byt5-small/config.json", "text_encoder/byt5-small/tokenizer_config.json")
    lacks = (*downloads, f"text_encoder/{COLORS}", f"text_encoder/{FONTS}", "vision_encoder/siglip")
    assert recognise(back).missing == lacks
    card = (back / "README.md").read_text()
    assert all(f"- {name}\n" in card for name in lacks) and "text_embed_2_dim is 10, must be 1472" in card
    with pytest.raises(ValueError, match=re.escape(f"lacks {', '.join(lacks[:-1])}")):
        convert(back, tmp_path / "again", "diffusers")
    for name in ("byt5-small", "Glyph-SDXL-v2/assets"):
        shutil.copytree(official / "text_encoder" / name, back / "text_encoder" / name)
    again = convert(back, tmp_path / "again", "diffusers")
    files = [file.relative_to(pipeline) for file in sorted(pipeline.rglob("*")) if file.is_file()]
    assert files == [file.relative_to(again) for file in sorted(again.rglob("*")) if file.is_file()]
    for file in files:
        if file.name != "README.md":
            assert (again / file).read_bytes() == (pipeline / file).read_bytes(), file


def test_the_pipeline_opens_everywhere_and_reads_text_as_the_official_encoders_do(official, pipeline) -> None:
    check_pipeline(pipeline)
    assert find_policy(pipeline).kind == "transformer"
    pipe = HunyuanVideo15Pipeline.from_pretrained(pipeline, torch_dtype=torch.float32)
    assert (pipe.scheduler.config.shift, pipe.guider.guidance_scale) == (5.0, 6.0)
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length = 40, 24
    with torch.no_grad():
        text, mask, glyph, glyph_mask = pipe.encode_prompt('a small red circle "hello"', device="cpu", batch_size=1)
        llm = AutoModel.from_pretrained(official / "text_encoder/llm", dtype=torch.float32).language_model
        chat = [{"role": "system", "content": pipe.system_message}]
        chat.append({"role": "user", "content": 'a small red circle "hello"'})
        options = {"padding": "max_length", "max_length": 148, "truncation": True, "return_tensors": "pt"}
        ids = pipe.tokenizer.apply_chat_template([chat], add_generation_prompt=True, return_dict=True, **options)
        hidden = llm(**ids, output_hidden_states=True).hidden_states[-3][:, 108:]
        encoder = glyph_encoder(official / "text_encoder")
        words = ByT5Tokenizer.from_pretrained(official / "text_encoder/byt5-small")(
            'Text "hello". ', padding="max_length", max_length=24, return_tensors="pt"
        )
        expected = encoder(words.input_ids, attention_mask=words.attention_mask.float())[0]
    assert mask.sum() > 0
    torch.testing.assert_close(text, hidden, rtol=1e-5, atol=1e-5)
    valid = glyph_mask[0].bool()
    assert torch.equal(glyph_mask, words.attention_mask) and valid.sum() > 5
    torch.testing.assert_close(glyph[0, valid], expected[0, valid], rtol=1e-5, atol=1e-5)
    assert pipe.tokenizer_2.convert_tokens_to_ids(["<color-1>", "<cn-font-1>"]) == [385, 387]
    video = pipe(
        "a small red circle", height=16, width=16, num_frames=3, num_inference_steps=1, output_type="pt"
    ).frames
    assert video.shape == (1, 3, 3, 16, 16) and video.isfinite().all()


def test_our_own_policy_goes_there_and_back(tmp_path) -> None:
    """The shipped policy has a shift of its own, so its official name must be given."""
    with pytest.raises(ValueError, match="shift=3.0 and guidance_scale=1.0 are those of no official 480p version"):
        convert(POLICY, tmp_path / "ckpts", "official")
    there = convert(POLICY, tmp_path / "ckpts", "official", "480p_t2v")
    assert recognise(there).versions == ("480p_t2v",)
    ByT5Tokenizer().save_pretrained(there / "text_encoder/byt5-small")
    shutil.copyfile(POLICY / "text_encoder_2/config.json", there / "text_encoder/byt5-small/config.json")
    write_json(there / "text_encoder" / COLORS, {})
    write_json(there / "text_encoder" / FONTS, {})
    back = convert(there, tmp_path / "policy", "diffusers")
    for part, stem in (("transformer", STEM), ("vae", STEM), ("text_encoder", "model"), ("text_encoder_2", "model")):
        assert same_bits(state_of(back / part, stem), state_of(POLICY / part, stem)), part
    for part in ("transformer", "vae"):
        assert settings_of(back / part / "config.json") == settings_of(POLICY / part / "config.json")


def refuse(source: Path, target: Path, words: str, direction: str = "diffusers", version: str | None = None) -> None:
    """convert names `words` and leaves nothing behind."""
    before = sorted(target.parent.iterdir())
    with pytest.raises(ValueError, match=re.escape(words)):
        convert(source, target, direction, version)
    assert sorted(target.parent.iterdir()) == before


def test_places_and_directions_that_cannot_be_are_refused(official, pipeline, tmp_path) -> None:
    out = tmp_path / "out"
    refuse(official, tmp_path, f"{tmp_path}: is there already")
    refuse(official, official / "inside", "must not lie inside the source")
    refuse(official, out, "is in the official layout already", "official")
    refuse(pipeline, out, "is in the diffusers layout already")
    refuse(
        tmp_path, out, "is in neither layout, holds no model_index.json of a HunyuanVideo15Pipeline and no transformer/"
    )
    refuse(official, out, "direction='sideways' must be one of", "sideways")
    refuse(official, out, "version='480p_i2v' must be one of 480p_t2v", version="480p_i2v")
    refuse(official, out, "holds no transformer/720p_t2v, holds 480p_t2v", version="720p_t2v")


def test_a_version_must_be_named_where_there_are_two(official, tmp_path) -> None:
    copy = shutil.copytree(official, tmp_path / "ckpts")
    shutil.copytree(copy / "transformer/480p_t2v", copy / "transformer/720p_t2v")
    refuse(copy, tmp_path / "out", "holds transformer/{480p_t2v, 720p_t2v}; --version must name one of")
    edit_json(copy / "transformer/720p_t2v/config.json", ideal_resolution="720p")
    out = convert(copy, tmp_path / "out", "diffusers", "720p_t2v")
    assert json.loads((out / "scheduler/scheduler_config.json").read_text())["shift"] == 9.0
    assert json.loads((out / "transformer/config.json").read_text())["target_size"] == 960
    assert (convert(out, tmp_path / "back", "official") / "transformer/720p_t2v").is_dir()


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("transformer/480p_t2v", {"ideal_task": "i2v"}, "ideal_task='i2v' must be 't2v'"),
        (
            "transformer/480p_t2v",
            {"mm_single_blocks_depth": 2},
            "mm_single_blocks_depth=2 has no counterpart in diffusers",
        ),
        ("transformer/480p_t2v", {"attn_mode": "flex-block-attn"}, "diffusers has no sparse attention"),
        ("transformer/480p_t2v", {"new_key": 1}, "key new_key is unknown"),
        (
            "transformer/480p_t2v",
            {"hidden_size": 64},
            "img_in.proj.weight is (32, 9, 1, 2, 2), must be (64, 9, 1, 2, 2)",
        ),
        ("vae", {"shift_factor": 0.1}, "shift_factor=0.1: diffusers' class has none"),
        (
            "vae",
            {"latent_channels": 8},
            "vae: encoder.conv_out.conv.weight is (8, 32, 3, 3, 3), must be (16, 32, 3, 3, 3)",
        ),
        ("text_encoder/llm", {"num_hidden_layers": 4}, "llm: layers.3.input_layernorm.weight is missing"),
    ],
)
def test_configurations_that_do_not_fit_are_named(official, tmp_path, part, change, words) -> None:
    copy = shutil.copytree(official, tmp_path / "ckpts")
    edit_json(copy / part / "config.json", **change)
    refuse(copy, tmp_path / "out", words)


def test_unknown_missing_and_doubled_tensors_are_named(official, tmp_path) -> None:
    copy, out = shutil.copytree(official, tmp_path / "ckpts"), tmp_path / "out"
    folder = copy / "transformer/480p_t2v"
    first, *_, last = sorted(folder.glob("*.safetensors"))
    state, kept = load_file(last), last.read_bytes()
    twice = next(iter(load_file(first)))
    save_file({**state, twice: torch.zeros(1)}, last)
    refuse(copy, out, f"{last}: key {twice} is also in {first.name}")
    save_file({**state, "extra.weight": torch.zeros(1)}, last)
    refuse(copy, out, f"{STEM}.safetensors.index.json: key extra.weight is not listed")
    save_file({key: value for key, value in state.items() if key != "final_layer.linear.bias"}, last)
    refuse(copy, out, f"{last}: must hold final_layer.linear.bias, as {STEM}.safetensors.index.json says")
    last.write_bytes(kept[:-1])
    refuse(copy, out, f"{last}: half-written")
    last.write_bytes(kept)
    vae = copy / f"vae/{STEM}.safetensors"
    save_file({**load_file(vae), "encoder.quant_conv.weight": torch.zeros(1)}, vae)
    refuse(copy, out, "vae: vae: unknown key encoder.quant_conv.weight; the nearest rule is")
    vae.unlink()
    refuse(copy, out, f"is in the official layout but lacks vae/{STEM}.safetensors")


class Code:
    """A pickle that would run something."""

    def __reduce__(self):
        return (print, ("ran",))


def test_glyph_files_that_do_not_fit_are_named_and_run_no_code(official, tmp_path, capsys) -> None:
    copy, out = shutil.copytree(official, tmp_path / "ckpts"), tmp_path / "out"
    file = copy / "text_encoder" / GLYPH
    state = torch.load(file, weights_only=True)
    for content, words in (
        ({**state, "x": Code()}, "must be a torch file of tensors only"),
        (
            {"state_dict": {"module.visual.a": torch.zeros(1)}},
            "unknown key module.visual.a; every key of state_dict must",
        ),
        ({**state, "block.9.weight": torch.zeros(1)}, "byt5: unknown key encoder.block.9.weight"),
        ({k: v for k, v in state.items() if "final" not in k}, "byt5: encoder.final_layer_norm.weight is missing"),
    ):
        torch.save(content, file)
        refuse(copy, out, words)
    assert "ran" not in capsys.readouterr().out
    torch.save(state, file)
    write_json(copy / "text_encoder" / COLORS, {"white": 0})
    refuse(copy, out, "embed_tokens.weight has 389 rows, the tokenizer with the colours and fonts")
    torch.save({"state_dict": {f"module.text_tower.encoder.{k}": v for k, v in state.items()}}, file)
    shutil.copyfile(official / "text_encoder" / COLORS, copy / "text_encoder" / COLORS)
    assert same_bits(
        state_of(convert(copy, out, "diffusers") / "text_encoder_2", "model"),
        {"shared.weight" if k == "embed_tokens.weight" else f"encoder.{k}": v for k, v in state.items()},
    )


def test_the_command_takes_the_other_layout(official, pipeline, tmp_path) -> None:
    parser = argparse.ArgumentParser()
    official_layout.add_arguments(parser)
    there = official_layout.run(parser.parse_args([str(official), str(tmp_path / "new" / "pipeline")]))
    assert recognise(there).kind == "diffusers"
    back = official_layout.run(
        parser.parse_args([str(there), str(tmp_path / "ckpts"), "--version", "480p_t2v_distilled"])
    )
    assert recognise(back).versions == ("480p_t2v_distilled",)
