"""Figure 9: std of every step, sage against flow, in three regimes of the clamp that sigma = 1 needs.

Both variances stand for eta^2 times the integral of s / (1 - s) over a step: sage takes it exactly, flow by its left
end. At sigma = 1 both are infinite, so the first step needs a clamp. Computed from the formulas alone, in float64.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from sage_ray.experiment.figures import new_figure, save
from sage_ray.experiment.tables import table
from sage_ray.schedule import sigma_grid
from sage_ray.transition import SAGE_CLAMP, coefficients

NUM_STEPS, SHIFT, ETA = 20, 5.0, 0.5
REGIMES = {
    "published": "each as published: sage at 1 - 0.003, flow at the grid's second sigma",
    "same": "both at 1 - 0.003",
    "second": "both at the grid's second sigma",
}
"""Name -> words. The first is what training uses."""


def clamp(sigmas: np.ndarray, method: str, regime: str) -> float:
    """The largest sigma that a method's formula is given."""
    second = float(sigmas[1])
    if regime == "same":
        return 1 - SAGE_CLAMP
    return second if regime == "second" or method == "flow_grpo" else 1 - SAGE_CLAMP


def variance(sigmas: np.ndarray, method: str, clamped_at: float) -> np.ndarray:
    """Variance of every step over eta^2, float64 [N]; negative where the clamp leaves a step no noise.

    sage: ln((1 - sigma_next) / (1 - c)) - D; flow: sigma / (1 - c) D; c = min(sigma, clamped_at), D the step's length.
    """
    sigma, following = sigmas[:-1], sigmas[1:]
    held = np.minimum(sigma, clamped_at)
    if method == "sage_grpo":
        return np.log((1 - following) / (1 - held)) - (sigma - following)
    return sigma / (1 - held) * (sigma - following)


def stds(num_steps: int = NUM_STEPS, shift: float = SHIFT, eta: float = ETA) -> dict[str, dict[str, list[float]]]:
    """regime -> method -> std of every step; 0 where the variance is negative."""
    sigmas = sigma_grid(num_steps, shift)
    return {
        regime: {
            method: (eta * np.sqrt(np.maximum(variance(sigmas, method, clamp(sigmas, method, regime)), 0))).tolist()
            for method in ("sage_grpo", "flow_grpo")
        }
        for regime in REGIMES
    }


def largest_difference() -> float:
    """Of the published regime's stds and those that training takes (`coefficients`, last step sde)."""
    sigmas, ours = sigma_grid(NUM_STEPS, SHIFT), stds()["published"]
    trained = {method: coefficients(method, sigmas, ETA, last_step="sde").std for method in ours}
    return max(float(np.abs(trained[method] - np.array(values)).max()) for method, values in ours.items())


def report(out: Path) -> Path:
    """Write figure9.md, figure9.png and figure9.json."""
    found, sigmas = stds(), sigma_grid(NUM_STEPS, SHIFT)[:-1]
    out.mkdir(parents=True, exist_ok=True)
    (out / "figure9.json").write_text(json.dumps({"sigmas": sigmas.tolist(), "std": found}, indent=1) + "\n", "utf-8")
    figure, panels = new_figure(len(REGIMES), 3.8)
    for panel, (regime, words) in zip(panels, REGIMES.items(), strict=True):
        for (method, values), colour in zip(found[regime].items(), ("tab:blue", "tab:orange"), strict=True):
            panel.plot(range(NUM_STEPS), values, "o-", ms=3, lw=1, color=colour, label=method.removesuffix("_grpo"))
        panel.set_title(words, fontsize=8)
        panel.set_xlabel("step", fontsize=8)
        panel.set_ylabel("std", fontsize=8)
    save(figure, out / "figure9.png")
    headings = ["step", "sigma", *(f"{m.removesuffix('_grpo')}, {r}" for r in REGIMES for m in found[r])]
    rows = [
        [str(i), f"{sigmas[i]:.4f}", *(f"{found[r][m][i]:.4f}" for r in REGIMES for m in found[r])]
        for i in range(NUM_STEPS)
    ]
    lines = [
        "# Figure 9: noise of a step, sage against flow, in three clamp regimes",
        "",
        "    python launch.py report figure9",
        "",
        f"{NUM_STEPS} steps, shift {SHIFT:g}, eta {ETA:g}, last step SDE. Regimes: "
        + "; ".join(f"*{name}* {words}" for name, words in REGIMES.items())
        + ". These three are ours; the paper's may be others.",
        "",
        "![std of every step](figure9.png)",
        "",
        table(headings, rows),
        "",
        *findings(found),
    ]
    path = out / "figure9.md"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def findings(found: dict[str, dict[str, list[float]]]) -> list[str]:
    """What the numbers say, in numbers."""
    ratio = {r: np.array(found[r]["flow_grpo"][1:]) / np.array(found[r]["sage_grpo"][1:]) for r in REGIMES}
    first = {r: (found[r]["sage_grpo"][0], found[r]["flow_grpo"][0]) for r in REGIMES}
    rest = ratio["same"]
    return [
        f"- The published regime's stds are those that training takes; the largest difference is "
        f"{largest_difference():.0e}.",
        f"- From the second step on the clamp changes nothing. Flow takes the integrand where the step begins, its "
        f"largest value: its std is above sage's by {100 * (rest.min() - 1):.0f} % to {100 * (rest.max() - 1):.0f} %, "
        "most at the ends of the grid.",
        f"- At the first step the clamp decides. Published: sage {first['published'][0]:.3f}, flow "
        f"{first['published'][1]:.3f}, so there sage is the noisier one. Both at 1 - 0.003: {first['same'][0]:.3f} and "
        f"{first['same'][1]:.3f}. Both at the second sigma: sage's variance is negative, the step has no noise and is "
        f"not trained; flow {first['second'][1]:.3f}.",
    ]
