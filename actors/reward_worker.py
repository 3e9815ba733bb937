"""A reward worker: every scorer of the run, and the small world's truth where the config names it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from actors.clocked import Clocked, phase
from sage_ray.config import Config
from sage_ray.frame_statistics import frame_statistics
from sage_ray.parked import Parked, tensors_of
from sage_ray.reward_parts import RewardParts
from sage_ray.rewards.build import NamedScorer, build_scorers, part_weights
from sage_ray.rewards.scorer import modules_of
from sage_ray.shapes.truth import judge
from sage_ray.types import AXES, VideoScore


class RewardWorker(Clocked):
    """Scores videos. What cannot be scored is nan with its reason; it is never given a number."""

    @phase("load")
    def __init__(self, config: Config, device: str):
        self.speaks_for(config)
        torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
        self.config, self.parked = config, Parked()
        self.scorers = build_scorers(config.reward, device)
        self.parts = tuple(part for named in self.scorers for part in named.parts)
        self.needed = RewardParts(self.parts, part_weights(config.reward, self.parts)).trained

    def ready(self) -> tuple[str, ...]:
        """Names of the parts of every score, once all models are loaded."""
        return self.parts

    @phase("turn")
    def leave(self) -> int:
        """The scorers' torch modules wait on the host; bytes freed on the device."""
        if self.parked.is_parked:
            return 0
        modules = nn.ModuleList(module for named in self.scorers for module in modules_of(named.scorer.scorer))
        return self.parked.park(*tensors_of(modules))

    @phase("turn")
    def enter(self) -> None:
        """They come back to the device."""
        self.parked.unpark()

    @phase("score")
    def score(self, indices: Sequence[int], prompts: Sequence[str], *groups: np.ndarray) -> list[VideoScore]:
        """Scores of one batch, in order.

        Args: indices: B positions in their groups. prompts: B texts. groups: B arrays uint8 [G, T, H, W, 3], the group
            of each video (the same one may come several times; it is shared memory).
        """
        if self.parked.is_parked:
            raise RuntimeError("this worker's weights wait on the host (leave); enter brings them back")
        start = time.monotonic()
        videos = [group[index] for index, group in zip(indices, groups, strict=True)]
        values = np.full((len(videos), 0), np.nan)
        reasons, notes = [""] * len(videos), [""] * len(videos)
        for named in self.scorers:
            columns = range(values.shape[1], values.shape[1] + len(named.parts))
            found, failed = self._score_with(named, videos, prompts)
            values = np.concatenate([values, found], 1)
            which = reasons if set(columns) & set(self.needed) else notes  # a measure that fails costs no video
            which[:] = [old or new for old, new in zip(which, failed, strict=True)]
        truths, matches = self._judge(videos, prompts)
        finite = np.isfinite(values[:, self.needed]).all(1)
        seconds = (time.monotonic() - start) / len(videos)
        return [
            VideoScore(
                parts=values[i],
                reason=reasons[i] or ("" if finite[i] else "a score is not finite"),
                note=notes[i],
                truth=truths[i],
                match=matches[i],
                frames={name: float(value[0]) for name, value in vars(frame_statistics(videos[i][None])).items()},
                seconds=seconds,
            )
            for i in range(len(videos))
        ]

    def _score_with(
        self, named: NamedScorer, videos: Sequence[np.ndarray], prompts: Sequence[str]
    ) -> tuple[np.ndarray, list[str]]:
        """(float64 [B, parts], reasons). A batch that fails is scored one by one: only the bad video is lost. A service
        that does not answer is not asked again for every video."""
        try:
            found = named.scorer.score(videos, prompts, self.config.sampling.fps)
            return found, [reason or "" for reason in named.reasons()] or [""] * len(videos)
        except (ValueError, RuntimeError, OSError) as error:
            if len(videos) == 1 or isinstance(error, ConnectionError):
                return np.full((len(videos), len(named.parts)), np.nan), [
                    f"{type(error).__name__}: {_first_line(error)}"
                ] * len(videos)
        single = [self._score_with(named, [video], [prompt]) for video, prompt in zip(videos, prompts, strict=True)]
        return np.concatenate([values for values, _ in single]), [reasons[0] for _, reasons in single]

    def _judge(self, videos: Sequence[np.ndarray], prompts: Sequence[str]) -> tuple[Sequence, Sequence]:
        """Truth [3] and match of every video, None without a judge."""
        if self.config.reward.truth != "shapes":
            return [None] * len(videos), [None] * len(videos)
        seen = judge(torch.from_numpy(np.stack(videos)), list(prompts))
        truth = torch.stack([seen.vq, seen.mq, seen.ta], 1).double().numpy()
        assert truth.shape[1] == len(AXES)
        return list(truth), seen.matches.double().tolist()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no further word"])[0]
