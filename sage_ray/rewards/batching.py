"""How many videos a reward worker scores at once, from a budget of vision tokens."""

from __future__ import annotations

from pathlib import Path

from sage_ray.config import Config
from sage_ray.json_object import read_object
from sage_ray.rewards.video_input import FACTOR, TEMPORAL, ClipRules, frame_indices, smart_resize


def video_tokens(num_frames: int, height: int, width: int, fps: float, rules: ClipRules) -> int:
    """Vision tokens that VideoAlign makes of one video."""
    pairs = -(-len(frame_indices(num_frames, fps, rules)) // TEMPORAL)
    rows, columns = smart_resize(height, width, rules.max_frame_pixels)
    return pairs * (rows // FACTOR) * (columns // FACTOR)


def batch_videos(config: Config) -> int:
    """Videos of a batch: reward.max_batch_tokens over the tokens of one, at least 1."""
    reward, sampling = config.reward, config.sampling
    rules = ClipRules(2.0, None, 200704)
    if reward.path is not None:
        data = read_object(Path(reward.path) / "model_config.json")["data_config"]
        rules = ClipRules(data["fps"], data.get("num_frames"), data["max_frame_pixels"])
    tokens = video_tokens(sampling.num_frames, sampling.height, sampling.width, sampling.fps, rules)
    return max(1, reward.max_batch_tokens // tokens)
