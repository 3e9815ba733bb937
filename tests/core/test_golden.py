"""Coefficients, equalizer and log-prob against the golden table (float64 restatement of the published formulas)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sage_ray.equalizer import equalizer_scales
from sage_ray.schedule import sigma_grid
from sage_ray.transition import coefficients, log_prob, mean, step_latents

TABLE = json.loads((Path(__file__).parents[1] / "data" / "sde_reference.json").read_text())
CASES = [pytest.param(case, id=f"{case['sde_type']}-{case['eta']}") for case in TABLE["cases"]]


def of_case(case):
    return coefficients(case["sde_type"], sigma_grid(20, 5.0), case["eta"], last_step="sde")


def column(case, key):
    return np.array([step[key] for step in case["steps"]], np.float64)


def example(case, key):
    return np.array([step["example"][key] for step in case["steps"]], np.float64)


def test_the_table_is_complete():
    assert [(c["sde_type"], c["eta"], len(c["steps"])) for c in TABLE["cases"]] == [
        (sde_type, eta, 20) for eta in (0.5, 1.0) for sde_type in ("sage_grpo", "dance_grpo", "flow_grpo", "cps")
    ]
    np.testing.assert_allclose(sigma_grid(20, 5.0), TABLE["sigmas"], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("case", CASES)
def test_coefficients(case):
    coefs = of_case(case)
    for key in ("x_coef", "v_coef", "std"):
        np.testing.assert_allclose(getattr(coefs, key), column(case, key), rtol=1e-12, atol=1e-12, err_msg=key)
    # Only cps ends on a deterministic step: its std is sigma_next sin(.).
    assert np.flatnonzero(~coefs.stochastic).tolist() == ([19] if case["sde_type"] == "cps" else [])


@pytest.mark.parametrize("case", CASES)
def test_coefficients_rounded_to_float32(case):
    coefs = of_case(case)
    for key in ("x_coef", "v_coef", "std"):
        rounded = getattr(coefs, key).astype(np.float32)
        np.testing.assert_allclose(rounded, column(case, key), rtol=0, atol=1e-7, err_msg=key)


@pytest.mark.parametrize("case", CASES)
def test_gradient_scale_and_equalizer(case):
    coefs = of_case(case)
    on = coefs.stochastic
    scale = coefs.gradient_scale()
    np.testing.assert_allclose(scale[on], column(case, "n")[on], rtol=1e-12)
    np.testing.assert_allclose(equalizer_scales(scale)[on], column(case, "S")[on], rtol=1e-12)
    assert np.sort(scale[on])[(on.sum() - 1) // 2] == pytest.approx(case["median_n"], rel=1e-12)
    assert np.isnan(scale[~on]).all() and np.isnan(equalizer_scales(scale)[~on]).all()


@pytest.mark.parametrize("case", CASES)
def test_example_in_float64(case):
    coefs = of_case(case)
    center = coefs.x_coef * example(case, "x") + coefs.v_coef * example(case, "v")
    following = center + coefs.std * example(case, "noise")
    np.testing.assert_allclose(center, example(case, "mean"), rtol=0, atol=1e-12)
    np.testing.assert_allclose(following, example(case, "next"), rtol=0, atol=1e-12)
    on, std = coefs.stochastic, coefs.std[coefs.stochastic]
    scores = -((following[on] - center[on]) ** 2) / (2 * std**2) - np.log(std) - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(scores, example(case, "log_prob")[on], rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_example_in_float32_tensors(case):
    coefs = of_case(case)
    for row in case["steps"]:
        i, want = row["i"], row["example"]
        x, v, noise = (torch.full((1, 1, 1, 1, 1), want[key]) for key in ("x", "v", "noise"))
        center = mean(coefs, i, x, v)
        following = step_latents(coefs, i, x, v, noise if coefs.stochastic[i] else None)
        assert center.dtype == following.dtype == torch.float32
        assert float(center) == pytest.approx(want["mean"], abs=1e-7)
        assert float(following) == pytest.approx(want["next"], abs=1e-7)
        if want["log_prob"] is None:
            with pytest.raises(ValueError, match="step 19"):
                log_prob(coefs, i, x, v, following)
        else:
            assert float(log_prob(coefs, i, x, v, following)) == pytest.approx(want["log_prob"], abs=2e-7)
