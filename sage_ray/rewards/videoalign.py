"""VideoAlign (VideoReward): visual quality, motion quality and text alignment of clips, as upstream computes them.

Rules that differ from stock Qwen2-VL: plain 1-D positions over vision and text tokens, rotary tables rounded to the
precision the weights were trained in, frames enlarged to at least 100352 pixels, scores read at three special tokens.
VQ and MQ come before the prompt and cannot depend on it. Left out: image input, other poolings, flash attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from sage_ray.from_settings import made_from
from sage_ray.rewards.checkpoint import RewardFolder, open_folder
from sage_ray.rewards.network import Inputs, RewardNetwork
from sage_ray.rewards.prompt_input import PromptEncoder
from sage_ray.rewards.video_input import FACTOR, PATCH, ClipRules, check_clip, clip_patches
from sage_ray.rewards.weight_files import DTYPES, read_shapes, read_tensors
from sage_ray.tensor_files import Shape
from sage_ray.types import AXES

MAX_BATCH = 32
"""Clips of one forward in `score`."""

Clip = np.ndarray | torch.Tensor


class VideoAlign(nn.Module):
    """The reward model of one VideoAlign folder. Made by `load`; frozen and in eval mode until told otherwise."""

    def __init__(self, folder: RewardFolder, network: RewardNetwork, prompts: PromptEncoder):
        super().__init__()
        data, constants = folder.config["data_config"], folder.config.get("inference_config")
        self.network, self.prompts = network, prompts
        self.rules = ClipRules(data["fps"], data.get("num_frames"), data["max_frame_pixels"])
        self.mean = [constants[f"{axis}_mean"] if constants else 0.0 for axis in AXES]
        self.std = [constants[f"{axis}_std"] if constants else 1.0 for axis in AXES]

    @staticmethod
    def check(folder: str | Path) -> None:
        """Raise ValueError naming file, key and rule when `folder` cannot be loaded; reads no tensor.

        Only that lm_head equals the embedding is left to `load`.
        """
        opened = open_folder(Path(folder))
        network, _ = _network(opened)
        match_shapes(network, read_shapes(opened.weights), opened.weights)

    @staticmethod
    def load(folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> VideoAlign:
        """Load strictly: no missing or unexpected key, every shape equal, lm_head equal to the embedding.

        Args: dtype: of weights and computation; None takes the checkpoint's.
        Raises: ValueError naming file and key.
        """
        opened = open_folder(Path(folder))
        trained = DTYPES[opened.config["model_config"]["torch_dtype"]]
        network, prompts = _network(opened)
        tensors = match_tensors(network, read_tensors(opened.weights), opened.weights)
        where = {"device": torch.device(device), "dtype": dtype or trained}
        network.fill({name: tensor.to(**where, copy=True) for name, tensor in tensors.items()}, trained)
        return VideoAlign(opened, network, prompts).eval().requires_grad_(False)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.network.rm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Weights and compute dtype."""
        return self.network.rm_head.weight.dtype

    @torch.no_grad()
    def score(self, videos: Sequence[Clip], prompts: Sequence[str], fps: float) -> torch.Tensor:
        """VQ, MQ and TA of every clip, normalised by inference_config where the folder has one.

        Args: videos: B clips uint8 [T, H, W, 3], shapes may differ. prompts: B texts. fps: that the clips play at.
        Returns: float64 [B, 3] on the CPU.
        Raises: ValueError naming the clip or the prompt that is wrong, before anything is computed.
        """
        self._check(videos, prompts)
        raw = torch.empty(len(videos), len(AXES), dtype=torch.float64)
        for shape in dict.fromkeys(tuple(clip.shape) for clip in videos):
            same = [i for i, clip in enumerate(videos) if tuple(clip.shape) == shape]
            for rows in (same[start : start + MAX_BATCH] for start in range(0, len(same), MAX_BATCH)):
                inputs = self.prepare([videos[i] for i in rows], [prompts[i] for i in rows], fps)
                raw[rows] = self(inputs).double().cpu()
        return self.normalise(raw)

    def normalise(self, raw: torch.Tensor) -> torch.Tensor:
        """(raw - mean) / std of inference_config. raw: [..., 3]; returns the same shape and dtype."""
        mean, std = (torch.tensor(values, dtype=raw.dtype, device=raw.device) for values in (self.mean, self.std))
        return (raw - mean) / std

    def prepare(self, videos: Sequence[Clip], prompts: Sequence[str], fps: float) -> Inputs:
        """Model input of clips of one shape: everything before the first weight, without gradient.

        Args and raises as `score`, at least one clip, one shape.
        """
        self._check(videos, prompts)
        if len({tuple(clip.shape) for clip in videos}) != 1:
            raise ValueError(f"videos: clips of one shape are needed, got {[list(clip.shape) for clip in videos]}")
        flat, grid = clip_patches(videos, fps, self.rules, self.device)
        num_pads = grid[0] * grid[1] * grid[2] * PATCH * PATCH // (FACTOR * FACTOR)
        token_ids, positions = self.prompts.batch(prompts, num_pads)
        return Inputs(
            flat.to(self.dtype), grid, token_ids.to(self.device), self.prompts.video_id, positions.to(self.device)
        )

    def forward(self, inputs: Inputs) -> torch.Tensor:
        """Raw scores [B, 3] of a prepared batch, with gradient."""
        return self.network(inputs)

    def official_state(self) -> dict[str, torch.Tensor]:
        """All parameters under official keys, copied to the CPU; what `write_checkpoint` takes."""
        names = self.network.official_names()
        state = {names[name]: tensor.detach().cpu().clone() for name, tensor in self.network.named_parameters()}
        embedding = state[f"{self.network.prefix}model.embed_tokens.weight"]
        return state | {f"{self.network.prefix}lm_head.weight": embedding.clone()}

    def _check(self, videos: Sequence[Clip], prompts: Sequence[str]) -> None:
        if isinstance(prompts, str) or len(videos) != len(prompts):
            raise ValueError(f"prompts: one text a video is needed, got {len(prompts)} for {len(videos)} videos")
        for i, clip in enumerate(videos):
            check_clip(clip, f"videos[{i}]")
        for prompt in prompts:
            self.prompts.encode(prompt)


def _network(opened: RewardFolder) -> tuple[RewardNetwork, PromptEncoder]:
    """The network without storage and the prompt encoder of a checked folder. Raises: ValueError naming the file."""
    try:
        prompts = PromptEncoder(opened.tokenizer, opened.template)
    except Exception as error:  # the tokenizers library raises plain Exception for a file of another format
        raise ValueError(f"{opened.tokenizer}: is not readable ({' '.join(str(error).split())})") from None
    lora, output_dim = opened.config["peft_lora_config"], opened.config["model_config"]["output_dim"]
    network = made_from(
        opened.base_file, "Qwen2-VL", lambda: RewardNetwork(opened.base_config, prompts.rows, lora, output_dim)
    )
    return network, prompts


def match_shapes(network: RewardNetwork, shapes: dict[str, Shape], files: tuple[Path, ...]) -> None:
    """Raises ValueError for the first key, under official names, that is missing, unexpected or of another shape.

    Args: files: where the tensors lie; the message names the one where the key belongs.
    """
    keys = network.official_names()
    head = f"{network.prefix}lm_head.weight"
    needed = set(keys.values()) | ({head} if len(files) == 1 else set())
    for found, words in ((needed - shapes.keys(), "missing"), (shapes.keys() - needed - {head}, "unexpected")):
        if found:
            raise ValueError(f"{_home(min(found), files)}: {len(found)} keys are {words}, the first is {min(found)}")
    expected = {keys[name]: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    if head in shapes:
        expected[head] = expected[f"{network.prefix}model.embed_tokens.weight"]
    for key, shape in expected.items():
        if shapes[key] != shape:
            raise ValueError(f"{_home(key, files)}: {key} has shape {list(shapes[key])}, must be {list(shape)}")


def _home(key: str, files: tuple[Path, ...]) -> Path:
    """The file that a key belongs to: an adapter's weights lie in the first of two."""
    return files[0] if ".lora_" in key else files[-1]


def match_tensors(
    network: RewardNetwork, state: dict[str, torch.Tensor], files: tuple[Path, ...]
) -> dict[str, torch.Tensor]:
    """Parameter name -> tensor for exactly the network's parameters, from tensors under official keys.

    Raises: ValueError as `match_shapes`, and when lm_head differs from the input embedding (upstream ties the two and
    would silently use lm_head's rows).
    """
    match_shapes(network, {key: tuple(tensor.shape) for key, tensor in state.items()}, files)
    head, embedding = f"{network.prefix}lm_head.weight", f"{network.prefix}model.embed_tokens.weight"
    if head in state and not torch.equal(state[head], state[embedding]):
        raise ValueError(f"{files[-1]}: {head} differs from {embedding}; upstream ties them, so they must be equal")
    return {name: state[key] for name, key in network.official_names().items()}


class VideoAlignScorer:
    """A VideoAlign folder as a Scorer."""

    parts = AXES

    def __init__(self, folder: str | Path, device: str = "cpu", dtype: torch.dtype | None = None):
        self.model = VideoAlign.load(folder, device, dtype)

    def score(self, videos: Sequence[np.ndarray], prompts: Sequence[str], fps: float) -> np.ndarray:
        """VQ, MQ and TA of every clip, normalised, float64 [B, 3]; raises as `VideoAlign.score`."""
        return self.model.score(videos, prompts, fps).numpy()
