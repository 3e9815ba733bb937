"""Noise is a function of its key: distinct for every key, the same wherever it is drawn."""

import hashlib
import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_ray.noise import EVALUATION, TRAINING, initial_noise, step_noise

SHAPE = (2, 3, 4)
PART = st.integers(0, 2**31 - 2)
KEY = st.tuples(PART, PART, PART, PART, PART, st.sampled_from((TRAINING, EVALUATION)))


def digest(noise: np.ndarray) -> str:
    return hashlib.sha256(noise.tobytes()).hexdigest()


def test_every_key_of_a_run_has_its_own_noise():
    keys = list(itertools.product(range(2), range(3), range(4), range(4), range(5), (TRAINING, EVALUATION)))
    hashes = [digest(step_noise(*key[:5], SHAPE, domain=key[5])) for key in keys]
    starts = sorted({(*key[:4], key[5]) for key in keys})
    hashes += [digest(initial_noise(*key[:4], SHAPE, domain=key[4])) for key in starts]
    assert len(set(hashes)) == len(keys) + len(starts)


def test_no_two_streams_overlap_when_shifted():
    """Neighbouring keys do not share a stretch of one stream: all float32 values of 64 long draws are distinct."""
    draws = [step_noise(0, step, group, 0, k, (500,)) for step, group, k in itertools.product(range(4), repeat=3)]
    pairs = np.stack([np.concatenate([d[:-1] for d in draws]), np.concatenate([d[1:] for d in draws])], 1)
    assert len(np.unique(pairs, axis=0)) == len(pairs)


@settings(deadline=None)
@given(KEY, KEY)
def test_noise_is_equal_exactly_when_the_key_is(one, other):
    first, second = (step_noise(*key[:5], SHAPE, domain=key[5]) for key in (one, other))
    assert np.array_equal(first, second) == (one == other)


def test_another_process_draws_the_same():
    code = (
        "import hashlib; from sage_ray.noise import step_noise;"
        "print(hashlib.sha256(step_noise(42, 7, 3, 1, 5, (2, 3, 4)).tobytes()).hexdigest())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == digest(step_noise(42, 7, 3, 1, 5, SHAPE))


def test_pinned_values():
    """A change of the keying would make every saved run irreproducible."""
    first = initial_noise(42, 0, 0, 0, (3,))
    np.testing.assert_allclose(first, [0.18170474, -1.2426393, -0.551553], rtol=1e-6)
    later = step_noise(42, 7, 3, 1, 5, (3,), domain=EVALUATION)
    np.testing.assert_allclose(later, [-0.8704808, -0.28765246, 0.91155475], rtol=1e-6)


def test_the_order_of_drawing_does_not_matter():
    keys = list(itertools.product(range(3), range(3)))
    forward = {key: digest(step_noise(1, 2, *key, 0, SHAPE)) for key in keys}
    assert forward == {key: digest(step_noise(1, 2, *key, 0, SHAPE)) for key in reversed(keys)}


def test_same_noise_per_group():
    def draw(group, sample, same):
        return initial_noise(42, 0, group, sample, SHAPE, same_noise_per_group=same)

    assert np.array_equal(draw(1, 0, True), draw(1, 3, True))
    assert not np.array_equal(draw(1, 0, True), draw(2, 0, True))
    assert not np.array_equal(draw(1, 0, False), draw(1, 3, False))
    assert not np.array_equal(step_noise(42, 0, 1, 0, 0, SHAPE), step_noise(42, 0, 1, 3, 0, SHAPE))


def test_standard_normal_float32():
    noise = step_noise(42, 0, 0, 0, 0, (100_000,))
    assert noise.dtype == np.float32
    # Five standard errors of the mean, the variance and the fourth moment of 1e5 normals.
    assert abs(noise.mean()) < 5 / 100_000**0.5
    assert abs(noise.var() - 1) < 5 * (2 / 100_000) ** 0.5
    assert abs((noise.astype(np.float64) ** 4).mean() - 3) < 5 * (96 / 100_000) ** 0.5


def test_neighbouring_keys_are_uncorrelated():
    base = step_noise(42, 0, 0, 0, 0, (100_000,))
    others = [
        step_noise(43, 0, 0, 0, 0, base.shape), step_noise(42, 1, 0, 0, 0, base.shape),
        step_noise(42, 0, 1, 0, 0, base.shape), step_noise(42, 0, 0, 1, 0, base.shape),
        step_noise(42, 0, 0, 0, 1, base.shape), initial_noise(42, 0, 0, 0, base.shape),
        step_noise(42, 0, 0, 0, 0, base.shape, domain=EVALUATION),
    ]  # fmt: skip
    for other in others:
        assert abs(np.corrcoef(base, other)[0, 1]) < 5 / 100_000**0.5


@pytest.mark.parametrize("name", ["seed", "step", "group", "sample", "sde_step"])
@pytest.mark.parametrize("value", [-1, 2**31])
def test_a_part_out_of_range_raises(name, value):
    key = {"seed": 0, "step": 0, "group": 0, "sample": 0, "sde_step": 0} | {name: value}
    with pytest.raises(ValueError, match=f"{name}: {value} "):
        step_noise(**key, shape=SHAPE)


def test_numpy_integers_key_like_ints_and_floats_raise():
    """An int32 group used to lose its bits in a shift, a float step its fraction: both repeated other noise."""
    expected = step_noise(1, 2, 3, 4, 5, SHAPE)
    assert np.array_equal(step_noise(*np.array([1, 2, 3, 4, 5], np.int32), SHAPE), expected)
    with pytest.raises(TypeError):
        step_noise(1, 2.5, 3, 4, 5, SHAPE)
