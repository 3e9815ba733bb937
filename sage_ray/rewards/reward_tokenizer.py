"""A small byte-level BPE tokenizer in the layout of VideoAlign's: Qwen2-VL's special tokens and three for reward."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from sage_ray.rewards.checkpoint import REWARD_TOKENS

SPECIAL_TOKENS = tuple(
    f"<|{name}|>"
    for name in (
        *("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end"),
        *("quad_start", "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"),
    )
)
"""Qwen2-VL's added tokens in the order of their ids."""

WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2 splits text before BPE."""


def train_tokenizer(corpus: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with at most vocab_size entries learned from `corpus`, then Qwen2-VL's 14 and 3 reward tokens."""
    byte_level = {"add_prefix_space": False, "use_regex": False}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(**byte_level),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel(trim_offsets=False, **byte_level)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False, **byte_level)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=1, show_progress=False, initial_alphabet=alphabet, special_tokens=[]
    )
    tokenizer.train_from_iterator(corpus, trainer)
    special = [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL_TOKENS, *REWARD_TOKENS)]
    tokenizer.add_special_tokens(special)
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the six files of an official tokenizer folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    bpe = json.loads(tokenizer.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(bpe["vocab"], ensure_ascii=False), "utf-8")
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in bpe["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", "utf-8")
    entries = {number: _entry(token.content) for number, token in tokenizer.get_added_tokens_decoder().items()}
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(number): entry for number, entry in sorted(entries.items())},
        "additional_special_tokens": list(REWARD_TOKENS),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "model_max_length": 32768,
        "padding_side": "right",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
        **ends,
    }
    special = {"additional_special_tokens": [_entry(token) for token in REWARD_TOKENS]}
    special |= {role: _entry(token) for role, token in ends.items()}
    for name, value in (
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", special),
        ("added_tokens.json", {entry["content"]: number for number, entry in sorted(entries.items())}),
    ):
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _entry(token: str) -> dict:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": token, **flags}
