"""CLIPScore and PickScore: numbers by hand, transformers' preprocessing and tokens, strict folders."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPModel, CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from sage_ray.rewards.clip_score import ClipScore, ImageRules, PickScore, check, frame_indices
from sage_ray.rewards.scorer import Scorer
from sage_ray.shapes.pretrain_clip import clip_config, clip_tokenizer, write_clip

PROMPTS = ["a small red circle", "", "a large blue square moves left on a white background"]


def clip(seed: int, frames: int = 5, height: int = 40, width: int = 50) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (frames, height, width, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    tokenizer = clip_tokenizer()
    folder = tmp_path_factory.mktemp("clip") / "CLIP"
    write_clip(folder, CLIPModel(clip_config(tokenizer)), tokenizer)
    return folder


@pytest.fixture(scope="module")
def model(made) -> ClipScore:
    return ClipScore.load(made)


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """A copy to break."""
    return shutil.copytree(made, tmp_path / "CLIP")


def edit(file: Path, **changes: object) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def known(scorer: type[ClipScore], model: ClipScore, images: torch.Tensor, text: list[float]) -> ClipScore:
    """A scorer whose embeddings are given: row i of `images` for the frame whose first pixel is i."""
    fake = SimpleNamespace(
        device="cpu",
        dtype=torch.float32,
        logit_scale=torch.tensor(math.log(10.0)),
        get_image_features=lambda pixel_values: SimpleNamespace(pooler_output=images[pixel_values[:, 0, 0, 0].long()]),
        get_text_features=lambda input_ids: SimpleNamespace(pooler_output=torch.tensor([text])),
    )
    raw = SimpleNamespace(pixels=lambda frames: frames.permute(0, 3, 1, 2).float())
    return scorer(fake, raw, model.prompts)


def numbered(*frames: int) -> np.ndarray:
    return np.stack([np.full((4, 4, 3), i, np.uint8) for i in frames])


@pytest.mark.parametrize(("scorer", "factor"), [(ClipScore, 100.0), (PickScore, 10.0)])
def test_numbers_by_hand(model, scorer, factor):
    """Embeddings (3, 4), (0, 2), (-1, 0) and text (5, 0): cosines 0.6, 0 and -1, averaged, not clamped."""
    scored = known(scorer, model, torch.tensor([[3.0, 4.0], [0.0, 2.0], [-1.0, 0.0]]), [5.0, 0.0])
    found = scored.score([numbered(0, 1), numbered(2), numbered(0, 0, 0, 2)], ["x", "x", "x"], 8.0)
    assert found == pytest.approx(factor * np.array([[0.3], [-1.0], [(3 * 0.6 - 1) / 4]]), rel=1e-6)
    assert found.dtype == np.float64


@pytest.mark.parametrize("row", [[0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0]])
def test_an_embedding_without_direction_is_nan(model, row):
    scored = known(ClipScore, model, torch.tensor([row]), [1.0, 0.0])
    assert np.isnan(scored.score([numbered(0)], ["x"], 8.0)).all()


def test_scores_are_transformers_own(made, model):
    """All of it against CLIPModel with CLIPTokenizer and the PIL processor; frames that need no resize."""
    frames = clip(3, 4, 32, 48)
    inputs = CLIPTokenizer.from_pretrained(made)(PROMPTS[:1], return_tensors="pt")
    pixels = CLIPImageProcessorPil.from_pretrained(made)(list(frames), return_tensors="pt").pixel_values
    with torch.no_grad():
        reference = CLIPModel.from_pretrained(made, dtype=torch.float32)
        logits = reference(pixel_values=pixels, **inputs).logits_per_image
        cosines = logits / reference.logit_scale.exp()
    assert model.score([frames], PROMPTS[:1], 8.0)[0, 0] == pytest.approx(100 * cosines.mean().item(), abs=1e-4)
    pick = PickScore.load(made).score([frames], PROMPTS[:1], 8.0)
    assert pick[0, 0] == pytest.approx(logits.mean().item(), abs=1e-4)


@pytest.mark.parametrize("size", [(32, 32), (40, 50), (50, 41), (480, 832), (33, 150), (20, 31)])
def test_preprocessing_is_near_the_pil_processor(made, model, size):
    rows, columns = np.meshgrid(np.linspace(0, 9, size[0]), np.linspace(0, 7, size[1]), indexing="ij")
    waves = 127 + 120 * np.sin(rows[..., None] * [1, 2, 3] + columns[..., None] * [3, 1, 2])
    frames = np.stack([waves.astype(np.uint8), clip(1, 1, *size)[0]])
    images = [Image.fromarray(frame) for frame in frames]
    expected = CLIPImageProcessorPil.from_pretrained(made)(images, return_tensors="pt").pixel_values
    found = model.images.pixels(torch.from_numpy(frames))
    std = torch.tensor(model.images.std).view(3, 1, 1)
    levels = (found - expected).abs() * std * 255
    assert found.shape == expected.shape == (2, 3, 32, 32)
    assert levels.max() < 2.01 and levels.mean() < 0.005


def test_frame_indices():
    assert frame_indices(9, None).tolist() == list(range(9))
    assert frame_indices(9, 3).tolist() == [0, 4, 8]
    assert frame_indices(9, 2).tolist() == [0, 8]
    assert frame_indices(9, 1).tolist() == [4]
    assert frame_indices(3, 8).tolist() == [0, 1, 2]


def test_num_frames_scores_those_frames(made, model):
    video = clip(7, 9)
    sampled = ClipScore.load(made, num_frames=3).score([video], PROMPTS[:1], 8.0)
    assert np.array_equal(sampled, model.score([video[[0, 4, 8]]], PROMPTS[:1], 8.0))
    with pytest.raises(ValueError, match="num_frames=0: must be None or at least 1"):
        ClipScore.load(made, num_frames=0)


def test_a_batch_equals_clips_alone_in_any_order_and_shape(model):
    videos = [clip(1), clip(2, 70, 32, 32), clip(3, 1, 33, 90)]
    for video in videos:
        video.setflags(write=False)
    together = model.score(videos, PROMPTS, 8.0)
    alone = np.concatenate([model.score([v], [p], 8.0) for v, p in zip(videos, PROMPTS, strict=True)])
    backwards = model.score(videos[::-1], PROMPTS[::-1], 8.0)[::-1]
    assert together.shape == (3, 1) and np.isfinite(together).all()
    assert np.array_equal(together, alone) and np.array_equal(together, backwards)
    assert len(set(together[:, 0])) == 3
    assert model.score([], [], 8.0).shape == (0, 1)


def test_it_is_a_scorer(model):
    assert isinstance(model, Scorer) and model.parts == ("CLIP",) and PickScore.parts == ("PickScore",)
    assert not model.model.training and not any(p.requires_grad for p in model.model.parameters())


def test_prompts_are_clips_tokens_and_truncated(made, model):
    tokenizer, long = CLIPTokenizer.from_pretrained(made), "a red circle, É 7! " * 40
    for prompt in (*PROMPTS, long):
        expected = tokenizer(prompt, truncation=True, max_length=77).input_ids
        assert model.prompts.encode(prompt) == expected
    assert len(model.prompts.encode(long)) == 77
    assert model.prompts.encode("") == [tokenizer.bos_token_id, tokenizer.eos_token_id]
    cut = tokenizer.decode(model.prompts.encode(long)[1:-1])
    assert np.array_equal(model.score([clip(1)], [long], 8.0), model.score([clip(1)], [cut], 8.0))


def test_padding_changes_nothing(model):
    ids = model.prompts.batch(PROMPTS)
    with torch.no_grad():
        together = model.text_features(ids)
        alone = torch.cat([model.text_features(model.prompts.batch([prompt])) for prompt in PROMPTS])
    assert torch.allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize("special", ["<|endoftext|>", "<|startoftext|>"])
def test_special_tokens_are_refused(model, special):
    """Also past the 77 tokens that are read, and before anything is computed."""
    for prompt in (special, f"red{special}circle", "red " * 100 + special):
        with pytest.raises(ValueError, match="must not hold a special token") as error:
            model.score([clip(1), clip(2)], ["fine", prompt], 8.0)
        assert repr(prompt) in str(error.value)


def test_special_tokens_in_capitals_are_refused_where_they_would_be_tokens(model, folder):
    """OpenAI's tokenizer.json looks for them after lowering the case; ours before, so there they are plain letters."""
    prompt = "red <|EndOfText|>"
    ids = model.prompts.encode(prompt)
    assert len(ids) > 3 and ids.count(ids[-1]) == 1
    content = json.loads((folder / "tokenizer.json").read_text())
    added = [token | {"normalized": True} for token in content["added_tokens"]]
    edit(folder / "tokenizer.json", added_tokens=added)
    with pytest.raises(ValueError, match="must not hold a special token"):
        ClipScore.load(folder).prompts.encode(prompt)


@pytest.mark.parametrize(
    ("videos", "prompts", "message"),
    [
        ([clip(1)], ["a", "b"], r"prompts: one text a video is needed, got 2 for 1 videos"),
        ([clip(1)], "a", r"prompts: one text a video is needed"),
        ([clip(1), clip(1).astype(np.float32)], ["a", "b"], r"videos\[1\]: must be uint8"),
        ([clip(1)[0]], ["a"], r"videos\[0\]: must be an array \[T, H, W, 3\]"),
        ([clip(1)[:0]], ["a"], r"videos\[0\]: must be an array"),
        ([clip(1)], [None], r"prompt None: must be a text"),
    ],
)
def test_wrong_input_is_named(model, videos, prompts, message):
    with pytest.raises(ValueError, match=message):
        model.score(videos, prompts, 8.0)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", [None, b"", "half"])
def test_missing_and_half_written_files_are_named(folder, name, content):
    file = folder / name
    half = file.read_bytes()[: file.stat().st_size // 2]
    file.unlink()
    if content is not None:
        file.write_bytes(half if content == "half" else content)
    named = "vocab.json" if (name, content) == ("tokenizer.json", None) else name
    for load in (check, ClipScore.check, PickScore.load):
        with pytest.raises(ValueError) as error:
            load(folder)
        assert named in str(error.value)


def test_a_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match="must be a CLIP directory, is missing"):
        check(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("config.json", {"model_type": "siglip"}, "model_type='siglip' must be 'clip'"),
        ("config.json", {"vision_config": None}, "section vision_config is missing"),
        ("config.json", {"text_config": {"hidden_size": "wide"}}, "hidden_size"),
        ("config.json", {"text_config": {"vocab_size": 100}}, "ids, config.json has vocab_size=100"),
        ("config.json", {"text_config": {}}, "eos_token_id=49407 must be the tokenizer's"),
        ("preprocessor_config.json", {"crop_size": 48}, "crop_size=48 must be the square of .* image_size=32"),
        ("preprocessor_config.json", {"size": {"height": 32, "width": 32}}, "must give a shortest_edge"),
        ("preprocessor_config.json", {"size": 24}, "size=24 must give a shortest_edge of at least the crop's 32"),
        ("preprocessor_config.json", {"do_center_crop": False}, "do_center_crop=False is not supported"),
        ("preprocessor_config.json", {"resample": 2}, "resample=2 is not supported, must be 3"),
        ("preprocessor_config.json", {"rescale_factor": 1.0}, "rescale_factor=1.0 is not supported"),
        ("preprocessor_config.json", {"image_std": [0, 1, 1]}, "image_std=.* must be three numbers above 0"),
        ("preprocessor_config.json", {"image_mean": None}, "image_mean=None must be three numbers"),
        ("tokenizer.json", {"model": {"type": "Nothing"}}, "the tokenizer files are not readable"),
    ],
)
def test_unsupported_settings_are_named(folder, name, changes, message):
    edit(folder / name, **changes)
    with pytest.raises(ValueError, match=message):
        check(folder)


def test_older_layouts_score_the_same(model, folder):
    """Sizes as numbers, eos_token_id 2, vocab.json with merges.txt, stored position_ids: as OpenAI's folders are."""
    content = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(content["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, content["merges"])]) + "\n")
    (folder / "tokenizer.json").unlink()
    edit(folder / "preprocessor_config.json", size=32, crop_size=32, rescale_factor=None)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit(folder / "config.json", text_config=text | {"eos_token_id": 2, "bos_token_id": 0})
    state = load_file(folder / "model.safetensors")
    buffers = {f"{tower}_model.embeddings.position_ids": torch.arange(17)[None] for tower in ("text", "vision")}
    save_file(state | buffers, folder / "model.safetensors", {"format": "pt"})
    videos = [clip(seed) for seed in range(3)]
    assert np.array_equal(ClipScore.load(folder).score(videos, PROMPTS, 8.0), model.score(videos, PROMPTS, 8.0))


def test_legacy_end_token_must_have_the_highest_id(folder):
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit(folder / "config.json", text_config=text | {"eos_token_id": 2, "vocab_size": 5000})
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="eos_token_id=2 needs an end token with the highest id"):
        check(folder)


@pytest.mark.parametrize(
    ("key", "tensor", "kind"),
    [
        ("text_projection.weight", None, "missing"),
        ("logit_scale", None, "missing"),
        ("vision_model.extra", torch.zeros(3), "unexpected"),
        ("visual_projection.weight", torch.zeros(8, 64), "mismatched"),
    ],
)
def test_keys_are_strict(folder, key, tensor, kind):
    state = load_file(folder / "model.safetensors")
    state.pop(key, None)
    save_file(state | ({} if tensor is None else {key: tensor}), folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"model\.safetensors: 1 keys are {kind}, the first is .*{key}"):
        ClipScore.load(folder)


def test_bfloat16_is_near(made, model):
    low = ClipScore.load(made, "cpu", torch.bfloat16)
    assert low.model.dtype == torch.bfloat16
    assert low.score([clip(1)], PROMPTS[:1], 8.0) == pytest.approx(model.score([clip(1)], PROMPTS[:1], 8.0), abs=1.5)


def test_image_rules_by_hand():
    """A crop of an odd rest starts at the smaller half; levels are / 255, - mean, / std."""
    frames = torch.arange(5, dtype=torch.uint8).view(1, 1, 5, 1).expand(1, 2, 5, 3)
    pixels = ImageRules(2, 2, (0.5, 0.0, 0.0), (0.5, 1.0, 2.0)).pixels(frames)
    expected = torch.tensor([1.0, 2.0]) / 255
    assert torch.allclose(pixels[0, :, 0], torch.stack([expected * 2 - 1, expected, expected / 2]))
