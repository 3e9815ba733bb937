"""Work, seconds and bytes of the real size against the measured numbers of docs/real_size.md, and by hand."""

import dataclasses

import pytest

from sage_ray.cost import H100, Dims, Way, attention_flops, forward_flops, forward_s, linear_flops, update_s

REAL = Dims(dim=2048, layers=54, refiner_layers=2, patch=(1, 1))
VIDEO, TEXT = 32_760, 200
FULL = Way(compiled=True, checkpointing=True, keep_attention=False, weight_gradients=True)


def test_work_of_one_forward_at_81_frames() -> None:
    """178 and 475 TFLOP of the video tokens alone; 660 with a prompt of 200 tokens."""
    assert linear_flops(2048, 54, VIDEO) / 1e12 == pytest.approx(178, abs=0.5)
    assert attention_flops(2048, 54, VIDEO) / 1e12 == pytest.approx(475, abs=0.5)
    assert forward_flops(2048, 54, VIDEO + TEXT) / 1e12 == pytest.approx(660, abs=0.5)


def test_parameters_of_the_real_model() -> None:
    """8.327 B, 151.1 M a block; adapters of rank 32 on 14 layers a block."""
    assert REAL.block_parameters == pytest.approx(151.1e6, rel=2e-3)
    assert REAL.parameters == pytest.approx(8.327e9, rel=0.01)
    video, text, modulations = 2048 * (4 * 2 + 5 + 5), 2048 * (4 * 2 + 5 + 5), 2048 * 2 * 7
    assert REAL.lora_parameters(32) == 54 * 32 * (video + text + modulations)


def test_tokens_of_patches() -> None:
    assert REAL.tokens((21, 30, 52)) == VIDEO
    assert dataclasses.replace(REAL, patch=(1, 2)).tokens((21, 30, 52)) == VIDEO // 4


def test_dims_of_a_config_file() -> None:
    settings = {"num_attention_heads": 16, "attention_head_dim": 128, "num_layers": 54, "num_refiner_layers": 2}
    assert Dims.of({**settings, "patch_size": 1, "patch_size_t": 1}) == REAL
    with pytest.raises(KeyError):
        Dims.of(settings)


@pytest.mark.parametrize(("compiled", "measured_s"), [(True, 1.207), (False, 1.589)])
def test_seconds_of_a_forward_are_the_measured_ones(compiled: bool, measured_s: float) -> None:
    assert forward_s(REAL, VIDEO + TEXT, compiled, H100()) == pytest.approx(measured_s, rel=0.01)


@pytest.mark.parametrize(
    ("compiled", "keep_attention", "measured_s"), [(True, False, 5.378), (True, True, 4.532), (False, False, 6.66)]
)
def test_seconds_of_an_update_are_the_measured_ones(compiled: bool, keep_attention: bool, measured_s: float) -> None:
    way = dataclasses.replace(FULL, compiled=compiled, keep_attention=keep_attention)
    assert update_s(REAL, VIDEO + TEXT, way, H100()) == pytest.approx(measured_s, rel=0.01)


def test_seconds_of_longer_videos_are_the_measured_ones() -> None:
    """121 frames: the rates come from 81."""
    assert forward_s(REAL, 48_360 + TEXT, True, H100()) == pytest.approx(2.373, rel=0.03)


def test_what_is_left_out_of_an_update_costs_nothing() -> None:
    """Rates of one make every part its count: 4 x GEMMs, 2 x attention, 2 x attention backward."""
    rates = H100(linear_flops_s=1, attention_flops_s=1, attention_backward_flops_s=1, compiled_update=1)
    linear, attention = linear_flops(2048, 54, 1000), attention_flops(2048, 54, 1000)

    def parts(**changes: bool) -> float:
        return update_s(REAL, 1000, dataclasses.replace(FULL, **changes), rates)

    assert parts() == 4 * linear + 4 * attention
    assert parts(keep_attention=True) == 4 * linear + 3 * attention
    assert parts(checkpointing=False) == 3 * linear + 3 * attention
    assert parts(keep_attention=True, weight_gradients=False) == 3 * linear + 3 * attention


def test_reward_rate_is_that_of_the_largest_measured_batch() -> None:
    assert [H100().reward_rate(batch) for batch in (0, 1, 3, 4, 100)] == [9.6, 9.6, 9.6, 26.0, 26.3]
