"""CLIPScore and PickScore of clips: how well every frame fits the prompt, averaged over frames.

Both read a local folder in transformers' CLIP layout: config.json, model.safetensors, preprocessor_config.json and
tokenizer.json (or vocab.json with merges.txt). PickScore_v1 is a CLIP-H fine-tuned on preferences, its folder is the
same. Clips are scored one at a time, so a score does not depend on the clips beside it. Left out: sharded and pickled
weights, preprocessing other than CLIP's, prompt prefixes ("A photo depicts").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPTokenizer, CLIPVisionConfig

from sage_ray.json_object import read_object
from sage_ray.rewards.video_input import check_clip, resize
from sage_ray.rewards.weight_files import check_weight_file

MAX_FRAMES = 64
"""Frames of one forward."""
LEGACY_EOS = 2
"""eos_token_id of configs older than transformers 4.31: pool at the highest token id, as OpenAI's code does."""
IMAGE_STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")
BICUBIC = 3


@dataclass(frozen=True)
class ImageRules:
    """preprocessor_config.json: shortest side after the resize, side of the centre crop, and constants per channel."""

    edge: int
    crop: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def pixels(self, frames: torch.Tensor) -> torch.Tensor:
        """What CLIP's image processor makes of frames, within 2 of 255 levels of its PIL version.

        Bicubic with antialias until the shorter side is `edge` (the longer one rounded down), across and then down,
        both rounded to 0..255 as PIL does; centre crop (an odd rest leaves the smaller half above and left); / 255,
        - mean, / std.
        Args: frames: uint8 [N, H, W, 3]. Returns: float32 [N, 3, crop, crop].
        """
        height, width = frames.shape[1:3]
        shortest = min(height, width)
        rows, columns = (self.edge * side // shortest for side in (height, width))
        resized = resize(resize(frames.permute(0, 3, 1, 2), (height, columns)), (rows, columns))
        top, left = (rows - self.crop) // 2, (columns - self.crop) // 2
        cropped = resized[..., top : top + self.crop, left : left + self.crop]
        mean, std = (torch.tensor(v, device=frames.device).view(3, 1, 1) for v in (self.mean, self.std))
        return (cropped / 255 - mean) / std


class PromptIds:
    """Prompts to token ids between CLIP's start and end token, cut to the model's positions as CLIP does."""

    def __init__(self, tokenizer: CLIPTokenizer, positions: int):
        start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        assert isinstance(start, int) and isinstance(end, int)
        self.tokenizer, self.positions, self.start, self.end = tokenizer, positions, start, end

    def encode(self, prompt: str) -> list[int]:
        """Ids of one prompt, at most `positions`; what does not fit is dropped from the end, as the processor's
        truncation=True does. An empty prompt is the two ends.

        Raises: ValueError naming the prompt when it is not a text, or holds a start or end token: CLIP's tokenizer
            takes "<|endoftext|>" (OpenAI's files: in any case of letters) for the token and would end the prompt there.
        """
        if not isinstance(prompt, str):
            raise ValueError(f"prompt {prompt!r}: must be a text, is {type(prompt).__name__}")
        encoding = self.tokenizer.backend_tokenizer.encode(prompt, add_special_tokens=False)
        if {self.start, self.end}.intersection(encoding.ids):
            ends = f"{self.tokenizer.bos_token} or {self.tokenizer.eos_token}"
            raise ValueError(f"prompt {prompt!r}: must not hold a special token, {ends}")
        return [self.start, *encoding.ids[: self.positions - 2], self.end]

    def batch(self, prompts: Sequence[str]) -> torch.Tensor:
        """int64 [B, L], padded on the right with the end token: attention is causal and pooling takes the first end,
        so padding changes nothing. Raises as `encode`."""
        encoded = [self.encode(prompt) for prompt in prompts]
        longest = max(map(len, encoded))
        return torch.tensor([ids + [self.end] * (longest - len(ids)) for ids in encoded])


@dataclass(frozen=True)
class ClipFolder:
    """A checked folder: its parsed small files."""

    path: Path
    config: CLIPConfig
    images: ImageRules
    prompts: PromptIds


def check(folder: str | Path) -> None:
    """Raise ValueError naming file and rule when `folder` cannot be loaded; reads no tensor."""
    open_folder(Path(folder))


def open_folder(folder: Path) -> ClipFolder:
    """Check a CLIP folder and parse its small files. Raises: ValueError naming file and rule."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: must be a CLIP directory, is {'a file' if folder.exists() else 'missing'}")
    config = _read_config(folder / "config.json")
    assert isinstance(config.text_config, CLIPTextConfig) and isinstance(config.vision_config, CLIPVisionConfig)
    images = _read_images(folder / "preprocessor_config.json", config.vision_config.image_size)
    prompts = _read_tokenizer(folder, config.text_config)
    check_weight_file(folder / "model.safetensors")
    return ClipFolder(folder, config, images, prompts)


def _read_config(file: Path) -> CLIPConfig:
    raw = read_object(file)
    if raw.get("model_type") != "clip":
        raise ValueError(f"{file}: model_type={raw.get('model_type')!r} must be 'clip'")
    for section in ("text_config", "vision_config"):
        if type(raw.get(section)) is not dict:
            raise ValueError(f"{file}: section {section} is missing")
    try:
        return CLIPConfig.from_dict(raw)
    except StrictDataclassError as error:
        raise ValueError(f"{file}: {' '.join(str(error).split())}") from None


def _read_images(file: Path, image_size: object) -> ImageRules:
    """The file may state sizes as a number or as {"shortest_edge"} and {"height", "width"}."""
    raw = read_object(file)
    size, crop = raw.get("size"), raw.get("crop_size")
    edge = size.get("shortest_edge") if isinstance(size, dict) else size
    side = crop.get("height") if isinstance(crop, dict) and crop.get("height") == crop.get("width") else crop
    if type(side) is not int or side != image_size:
        raise ValueError(f"{file}: crop_size={crop!r} must be the square of config.json's image_size={image_size!r}")
    if type(edge) is not int or edge < side:
        raise ValueError(f"{file}: size={size!r} must give a shortest_edge of at least the crop's {side}")
    for step in IMAGE_STEPS:
        if raw.get(step, True) is not True:
            raise ValueError(f"{file}: {step}={raw[step]!r} is not supported, must be true")
    if raw.get("resample", BICUBIC) != BICUBIC:
        raise ValueError(f"{file}: resample={raw['resample']!r} is not supported, must be {BICUBIC} (bicubic)")
    factor = raw.get("rescale_factor", 1 / 255)
    if not isinstance(factor, float) or abs(factor * 255 - 1) > 1e-6:
        raise ValueError(f"{file}: rescale_factor={factor!r} is not supported, must be 1/255")
    return ImageRules(edge, side, *(_constants(file, raw, key) for key in ("image_mean", "image_std")))


def _constants(file: Path, raw: dict, key: str) -> tuple[float, float, float]:
    values = raw.get(key)
    if not isinstance(values, list) or len(values) != 3 or not all(type(v) in (int, float) and v > 0 for v in values):
        raise ValueError(f"{file}: {key}={values!r} must be three numbers above 0")
    return values[0], values[1], values[2]


def _read_tokenizer(folder: Path, text: CLIPTextConfig) -> PromptIds:
    """transformers makes a tokenizer of two tokens out of nothing, so the files and the ids are checked."""
    if (folder / "tokenizer.json").exists():
        read_object(folder / "tokenizer.json")
    else:
        read_object(folder / "vocab.json")
        if not (folder / "merges.txt").is_file():
            raise ValueError(f"{folder / 'merges.txt'}: the file is missing, as is tokenizer.json")
    try:
        tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception for a file of another format
        raise ValueError(f"{folder}: the tokenizer files are not readable ({' '.join(str(error).split())})") from None
    size, end = len(tokenizer), tokenizer.eos_token_id
    if size > text.vocab_size:
        raise ValueError(f"{folder}: the tokenizer has {size} ids, config.json has vocab_size={text.vocab_size}")
    if text.eos_token_id not in (LEGACY_EOS, end):
        raise ValueError(f"{folder / 'config.json'}: eos_token_id={text.eos_token_id} must be the tokenizer's {end}")
    if text.eos_token_id == LEGACY_EOS and end != size - 1:
        raise ValueError(f"{folder / 'config.json'}: eos_token_id=2 needs an end token with the highest id, is {end}")
    return PromptIds(tokenizer, text.max_position_embeddings)


class ClipScore:
    """CLIPScore of a clip: mean over its frames of 100 * cos(image embedding, text embedding).

    The mean of cosines over frames is EvalCrafter's CLIP-Score (arXiv 2310.11440, calculate_clip_score), without
    clamping. The factor 100 is torchmetrics' CLIPScore. Hessel et al. (arXiv 2104.08718: 2.5 * max(cos, 0)) and
    torchmetrics clamp at 0; that is not done here, a reward must still order clips below 0.
    """

    parts: tuple[str, ...] = ("CLIP",)

    def __init__(self, model: CLIPModel, images: ImageRules, prompts: PromptIds, num_frames: int | None = None):
        """num_frames: frames of a clip that are scored, evenly spread, the first and the last included (1: the
        middle one); None or more than it has: all."""
        if num_frames is not None and (type(num_frames) is not int or num_frames < 1):
            raise ValueError(f"num_frames={num_frames!r}: must be None or at least 1")
        self.model, self.images, self.prompts, self.num_frames = model, images, prompts, num_frames

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        num_frames: int | None = None,
    ) -> Self:
        """Load strictly: no missing, unexpected or wrongly shaped key; old files may hold position_ids.

        Args: dtype: of weights and computation. num_frames: as __init__.
        Raises: ValueError naming file and rule.
        """
        opened = open_folder(Path(folder))
        model = load_model(opened, dtype).to(device)
        return cls(model.eval().requires_grad_(False), opened.images, opened.prompts, num_frames)

    @staticmethod
    def check(folder: str | Path) -> None:
        """As the function `check`."""
        check(folder)

    def scale(self) -> float:
        """What the cosine is multiplied by."""
        return 100.0

    @torch.no_grad()
    def score(self, videos: Sequence[np.ndarray], prompts: Sequence[str], fps: float) -> np.ndarray:
        """scale() * mean cosine of every clip, float64 [B, 1]; nan where an embedding is not finite or is zero.

        Args: videos: B clips uint8 [T, H, W, 3], shapes may differ. prompts: B texts. fps: not used.
        Raises: ValueError naming the clip or the prompt that is wrong, before anything is computed.
        """
        if isinstance(prompts, str) or len(videos) != len(prompts):
            raise ValueError(f"prompts: one text a video is needed, got {len(prompts)} for {len(videos)} videos")
        for i, clip in enumerate(videos):
            check_clip(clip, f"videos[{i}]")
        ids = {prompt: self.prompts.batch([prompt]) for prompt in prompts}
        texts = {prompt: unit(self.text_features(row)) for prompt, row in ids.items()}
        rows = [(unit(self.clip_features(v)) @ texts[p].T).mean() for v, p in zip(videos, prompts, strict=True)]
        return self.scale() * np.array([row.item() for row in rows], np.float64).reshape(-1, 1)

    def clip_features(self, clip: np.ndarray) -> torch.Tensor:
        """Image embeddings of the scored frames, [n, D], not normalised. clip: uint8 [T, H, W, 3]."""
        chosen = frame_indices(len(clip), self.num_frames)
        parts = [clip[chosen[start : start + MAX_FRAMES]] for start in range(0, len(chosen), MAX_FRAMES)]
        return torch.cat([self.frame_features(torch.as_tensor(part)) for part in parts])

    def frame_features(self, frames: torch.Tensor) -> torch.Tensor:
        """Image embeddings [N, D], with gradient where one is wanted. frames: uint8 [N, H, W, 3]."""
        pixels = self.images.pixels(frames.to(self.model.device)).to(self.model.dtype)
        return _embedding(self.model.get_image_features(pixel_values=pixels))

    def text_features(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Text embeddings [B, D], with gradient where one is wanted. token_ids: int64 [B, L]."""
        return _embedding(self.model.get_text_features(input_ids=token_ids.to(self.model.device)))


class PickScore(ClipScore):
    """PickScore of a clip: mean over its frames of exp(logit_scale) * cos(image embedding, text embedding).

    The score of Kirstain et al. (arXiv 2305.01569, section 4; the model card's calc_probs before its softmax), of
    images there. logit_scale is a weight of the checkpoint.
    """

    parts = ("PickScore",)

    def scale(self) -> float:
        """exp(logit_scale)."""
        return self.model.logit_scale.detach().double().exp().item()


def _embedding(output: Any) -> torch.Tensor:
    """transformers puts the projected embedding here, and types it as optional."""
    return output.pooler_output


def unit(features: torch.Tensor) -> torch.Tensor:
    """float64 rows of length 1; nan for a row of zeros, which has no direction."""
    features = features.double()
    return features / features.norm(dim=-1, keepdim=True)


def frame_indices(total: int, num_frames: int | None) -> np.ndarray:
    """int64 [n]: which of `total` frames are scored, see ClipScore.__init__."""
    if num_frames is None or num_frames >= total:
        return np.arange(total)
    if num_frames == 1:
        return np.array([(total - 1) // 2])
    return np.linspace(0, total - 1, num_frames).round().astype(np.int64)


def load_model(folder: ClipFolder, dtype: torch.dtype) -> CLIPModel:
    """The model on the CPU. Raises: ValueError naming the key that is missing, unexpected or wrongly shaped."""
    file = folder.path / "model.safetensors"
    loaded: Any = CLIPModel.from_pretrained(
        folder.path,
        config=folder.config,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # so that they are reported and refused here, as the others are
        output_loading_info=True,
    )
    model, found = loaded
    for kind in ("missing", "unexpected", "mismatched"):
        keys = sorted(str(key) for key in found[f"{kind}_keys"] if not str(key).endswith(".position_ids"))
        if keys:
            raise ValueError(f"{file}: {len(keys)} keys are {kind}, the first is {keys[0]}")
    return model
