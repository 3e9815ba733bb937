"""Prompts are encoded once, and encoders that wait on the host give the same bits."""

import numpy as np
import pytest
import torch

from sage_ray.models import prompt_encoder
from sage_ray.models.hunyuan_video import HunyuanVideo
from sage_ray.parked import Parked
from tests.conftest import POLICY

TEXTS = ("a small red circle moves left", 'a sign that says "go"', "")


class CountingParked(Parked):
    """Counts the returns to the device."""

    num_returns = 0

    def unpark(self) -> None:
        CountingParked.num_returns += 1
        super().unpark()


@pytest.fixture
def parking(monkeypatch) -> HunyuanVideo:
    monkeypatch.setattr(prompt_encoder, "Parked", CountingParked)
    CountingParked.num_returns = 0
    return HunyuanVideo.load(POLICY, parks_encoders=True)


def bytes_there(model: HunyuanVideo) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in model.prompts.tensors())


def test_parked_encoders_give_the_same_bits_and_return_once_for_all_new_prompts(policy, parking) -> None:
    assert bytes_there(parking) == 0 and bytes_there(policy) > 0
    for number, texts in enumerate((TEXTS[:1], TEXTS), 1):
        for mine, theirs in zip(parking.encode_prompts(texts), policy.encode_prompts(texts), strict=True):
            assert np.array_equal(mine.text, theirs.text) and np.array_equal(mine.byt5, theirs.byt5)
        assert bytes_there(parking) == 0 and CountingParked.num_returns == number
    assert parking.encode_prompts(TEXTS)[1].byt5.shape[0] > 0
    parking.encode_prompt(TEXTS[2])
    assert CountingParked.num_returns == 2


def test_encoders_are_parked_again_when_encoding_fails(parking) -> None:
    with pytest.raises(TypeError):
        parking.encode_prompts([TEXTS[0], 3])  # type: ignore[list-item]
    assert bytes_there(parking) == 0
    assert parking.encode_prompt(TEXTS[0]).text.shape[0] > 0


def test_the_prompts_used_last_are_kept(policy, monkeypatch) -> None:
    monkeypatch.setattr(prompt_encoder, "MAX_CONDITIONS", 2)
    encoder = prompt_encoder.PromptEncoder(policy.pipeline, policy.device)
    first, second = encoder.encode(TEXTS[:2])
    encoder.encode(TEXTS[:1])
    assert len(encoder.encode([TEXTS[2], *TEXTS[:2]])) == 3
    again = encoder.encode(TEXTS[:2])
    assert again[0] is first and again[1] is second


def test_bfloat16_encoders_and_vae_are_loaded_in_it() -> None:
    model = HunyuanVideo.load(POLICY, torch.bfloat16)
    for module in (model.vae, model.pipeline.text_encoder, model.pipeline.text_encoder_2):
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert model.encode_prompt(TEXTS[0]).text.dtype == np.float32
