"""Prompts to VideoAlign's token ids: one chat turn of video and template, user text kept free of special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from sage_ray.rewards.checkpoint import REWARD_TOKENS

BEFORE_VIDEO = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
AFTER_VIDEO = "<|vision_end|>"
AFTER_TEMPLATE = "<|im_end|>\n<|im_start|>assistant\n"
MAX_CACHED = 256
"""Prompts whose ids are kept; an iteration scores each prompt several times."""


class PromptEncoder:
    """Token ids of prompts, cached: the part before the video once, the part behind it per prompt."""

    def __init__(self, tokenizer_file: Path, template: str):
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.template = template
        self.rows = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self.video_id = self.tokenizer.token_to_id("<|video_pad|>")
        self.pad_id = self.tokenizer.token_to_id("<|endoftext|>")
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {token.content: number for number, token in added.items()}
        self.before = self._ids(BEFORE_VIDEO)
        self._cache: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.num_special = self._count_special(self._behind_video("")[0])

    def batch(self, prompts: Sequence[str], num_pads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of one batch, padded on the right.

        Args: prompts: B texts. num_pads: video tokens of every row.
        Returns: int64 [B, L] token ids; int64 [B, 3] positions of the VQ, MQ and TA token.
        Raises: ValueError naming the prompt that holds a special token.
        """
        encoded = [self.encode(prompt) for prompt in prompts]
        start = len(self.before) + num_pads
        longest = max(len(ids) for ids, _ in encoded)
        token_ids = torch.full((len(prompts), start + longest), self.pad_id)
        token_ids[:, : len(self.before)] = self.before
        token_ids[:, len(self.before) : start] = self.video_id
        for row, (ids, _) in zip(token_ids, encoded, strict=True):
            row[start : start + len(ids)] = ids
        return token_ids, start + torch.stack([positions for _, positions in encoded])

    def encode(self, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids behind the video [L], positions of the reward tokens in them [3]); raises as `batch` does."""
        if prompt not in self._cache:
            if not isinstance(prompt, str):
                raise ValueError(f"prompt {prompt!r}: must be a text, is {type(prompt).__name__}")
            if held := [content for content in self.special if content in prompt]:
                raise ValueError(f"prompt {prompt!r}: must not hold a special token, holds {held}")
            ids, positions = self._behind_video(prompt)
            if self._count_special(ids) != self.num_special:
                raise ValueError(f"prompt {prompt!r}: must not form a special token with the template around it")
            if len(self._cache) >= MAX_CACHED:
                del self._cache[next(iter(self._cache))]
            self._cache[prompt] = ids, positions
        return self._cache[prompt]

    def _behind_video(self, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self._ids(AFTER_VIDEO + self.template.format(text_prompt=prompt) + AFTER_TEMPLATE)
        found = [(ids == self.special[token]).nonzero().flatten() for token in REWARD_TOKENS]
        if [len(places) for places in found] != [1, 1, 1]:
            raise ValueError(f"prompt {prompt!r}: every reward token must occur once, found {found}")
        return ids, torch.cat(found)

    def _count_special(self, ids: torch.Tensor) -> int:
        return int(torch.isin(ids, torch.tensor(list(self.special.values()))).sum())

    def _ids(self, text: str) -> torch.Tensor:
        return torch.tensor(self.tokenizer.encode(text, add_special_tokens=False).ids)
