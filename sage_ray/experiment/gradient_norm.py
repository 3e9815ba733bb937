"""Figure 4: norm of the log-prob's gradient at every sigma, measured beside what is predicted.

With respect to the step's mean it is an identity: the gradient of the log-density is noise / std, so its root mean
square over dimensions is 1 / std, slope -1 of logs. With respect to the parameters it is a finding: the chain rule
gives |v_coef| / std = n_t times what the velocity's Jacobian makes of unit noise, which no formula knows.

`python -m sage_ray.experiment.gradient_norm` measures on the CPU (minutes) and writes figure4.json;
`launch.py report figure4` draws it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sage_ray.experiment.figures import new_figure, save
from sage_ray.experiment.spec import ROOT
from sage_ray.experiment.tables import table
from sage_ray.models.condition import condition_tensors
from sage_ray.models.hunyuan_video import HunyuanVideo, scheduler_shift
from sage_ray.models.packed_velocity import guided_velocity
from sage_ray.noise import initial_noise, step_noise
from sage_ray.sampler import generate
from sage_ray.schedule import sigma_grid
from sage_ray.transition import Coefficients, coefficients, log_prob, mean

METHODS = ("sage_grpo", "dance_grpo", "flow_grpo", "cps")
NUM_STEPS, ETA, SEED = 20, 0.5, 20
FILE = "figure4.json"


def measure(folder: Path, prompts: Sequence[str], methods: Sequence[str] = METHODS, num_steps: int = NUM_STEPS) -> dict:
    """Gradient norms of one video a prompt at every stochastic step of every method.

    Args: folder: a pipeline directory of the small world. Returns: settings, and per method step, sigma, std, n_t,
        to_mean [steps, P] (root mean square over dimensions of the density's gradient, over that of the noise drawn)
        and to_parameters [steps, P] (norm over all trainable parameters of the gradient of the log-prob, a mean over
        dimensions).
    """
    model = HunyuanVideo.load(folder, torch.float32, "cpu")
    for name, parameter in model.velocity.named_parameters():
        parameter.requires_grad_(name in model.velocity.trainable_names)
    shift = scheduler_shift(folder)
    sigmas = sigma_grid(num_steps, shift)
    found = {method: _measure(model, prompts, coefficients(method, sigmas, ETA)) for method in methods}
    settings = {"num_steps": num_steps, "shift": shift, "eta": ETA, "seed": SEED, "num_videos": len(prompts)}
    return {**settings, "methods": found}


def _measure(model: HunyuanVideo, prompts: Sequence[str], coefs: Coefficients) -> dict[str, Any]:
    """One method."""
    conditions = model.encode_prompts(list(prompts))
    shape = model.latent_shape(9, 32, 32)
    to_mean: dict[int, list[float]] = {step: [] for step in coefs.sde_steps}
    to_parameters: dict[int, list[float]] = {step: [] for step in coefs.sde_steps}
    for number, condition in enumerate(conditions):
        tensors = condition_tensors([condition], torch.device("cpu"))

        def velocity(latents: torch.Tensor, sigma: float | np.ndarray, given: Any = tensors) -> torch.Tensor:
            return guided_velocity(model.velocity, latents, np.atleast_1d(sigma).tolist(), given, None, 1.0)

        start = _noise(shape, number)
        made = generate(velocity, start, coefs, lambda step, n=number: _noise(shape, n, step))
        for step in coefs.sde_steps:
            state, following = made.states[step], made.states[step + 1]
            with torch.no_grad():
                v = velocity(state, coefs.sigmas[step])
            drawn = _noise(shape, number, step).square().mean().sqrt()
            to_mean[step].append(mean_gradient(coefs, step, state, v, following) / float(drawn))
            to_parameters[step].append(_parameter_gradient(model, velocity, coefs, step, state, following))
    scale = coefs.gradient_scale()
    return {
        "step": list(coefs.sde_steps),
        "sigma": [float(coefs.sigmas[step]) for step in coefs.sde_steps],
        "std": [float(coefs.std[step]) for step in coefs.sde_steps],
        "n": [float(scale[step]) for step in coefs.sde_steps],
        "to_mean": [_short(to_mean[step], 9) for step in coefs.sde_steps],
        "to_parameters": [_short(to_parameters[step], 5) for step in coefs.sde_steps],
    }


def _short(values: Sequence[float], digits: int) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values]


def mean_gradient(
    coefs: Coefficients, step: int, state: torch.Tensor, velocity: torch.Tensor, following: torch.Tensor
) -> float:
    """Root mean square over dimensions of the gradient of the log-density with respect to the step's mean [1, ...]."""
    center = mean(coefs, step, state, velocity).detach().requires_grad_(True)
    density = (-(following - center).square() / (2 * float(coefs.std[step]) ** 2)).sum()
    (gradient,) = torch.autograd.grad(density, center)
    return float(gradient.square().mean().sqrt())


def _parameter_gradient(model, velocity, coefs: Coefficients, step: int, state, following) -> float:
    """Norm of the gradient of one video's log-prob."""
    trained = [parameter for parameter in model.velocity.parameters() if parameter.requires_grad]
    score = log_prob(coefs, step, state, velocity(state, coefs.sigmas[step]), following)
    gradients = torch.autograd.grad(score.sum(), trained, allow_unused=True)
    return float(torch.stack([g.square().sum() for g in gradients if g is not None]).sum().sqrt())


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of log y over log x, least squares."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def report(out: Path) -> Path:
    """Draw figure4.png and write figure4.md from figure4.json. Raises: ValueError when nothing was measured."""
    file = out / FILE
    if not file.is_file():
        raise ValueError(f"{file}: is missing; python -m sage_ray.experiment.gradient_norm --out {out} measures it")
    found = json.loads(file.read_text("utf-8"))
    figure, panels = new_figure(len(found["methods"]), 3.6)
    rows = []
    for panel, (method, values) in zip(panels, found["methods"].items(), strict=True):
        measured, n, std = (np.array(values[key]) for key in ("to_parameters", "n", "std"))
        center = measured.mean(1)
        _panel(panel, method, values, center, measured)
        rows.append(_row(method, values, center, n, std))
    save(figure, out / "figure4.png")
    path = out / "figure4.md"
    path.write_text("\n".join(_page(found, rows)) + "\n", "utf-8")
    return path


def _panel(panel: Any, method: str, values: dict, center: np.ndarray, measured: np.ndarray) -> None:
    """Parameters' gradient with its range over videos, and the two predictions scaled to its median."""
    sigma = values["sigma"]
    panel.plot(sigma, center, "o-", ms=3, lw=1, color="tab:blue", label="measured, parameters (mean and range)")
    panel.fill_between(sigma, measured.min(1), measured.max(1), color="tab:blue", alpha=0.15, lw=0)
    for key, style in (("n", "--"), ("std", ":")):
        predicted = np.array(values[key]) if key == "n" else 1 / np.array(values[key])
        scaled = predicted * np.median(center) / np.median(predicted)
        label = "|v_coef| / std, scaled" if key == "n" else "1 / std, scaled"
        panel.plot(sigma, scaled, style, color="0.3", lw=1, label=label)
    panel.set_yscale("log")
    panel.invert_xaxis()
    panel.set_title(method, fontsize=9)
    panel.set_xlabel("sigma", fontsize=8)


def _row(method: str, values: dict, center: np.ndarray, n: np.ndarray, std: np.ndarray) -> list[str]:
    to_mean = np.array(values["to_mean"])
    equalized = center * np.median(n) / n
    return [
        method,
        f"{slope(std, to_mean.mean(1)):+.4f}",
        f"{np.abs(to_mean * std[:, None] - 1).max():.0e}",
        f"{slope(n, center):+.2f}",
        f"{np.corrcoef(np.log(n), np.log(center))[0, 1]:+.3f}",
        f"{slope(1 / std, center):+.2f}",
        f"{center.max() / center.min():.1f}",
        f"{equalized.max() / equalized.min():.1f}",
    ]


def _page(found: dict, rows: list[list[str]]) -> list[str]:
    headings = [
        "method",
        "slope of the mean's gradient over std",
        "largest error of gradient x std / noise",
        "slope of the parameters' gradient over n_t",
        "correlation of logs",
        "slope over 1 / std",
        "largest over smallest step",
        "the same, equalized",
    ]
    return [
        "# Figure 4: gradient norm at every sigma, measured and predicted",
        "",
        "    python -m sage_ray.experiment.gradient_norm",
        "    python launch.py report figure4",
        "",
        f"The small world's policy before training, {found['num_videos']} videos of as many prompts, "
        f"{found['num_steps']} steps (the last one ODE), shift {found['shift']:g}, eta {found['eta']}, seed "
        f"{found['seed']}, float32 on a CPU. "
        "Gradient of one video's log-prob; n_t = |v_coef| / std.",
        "",
        "![gradient norms](figure4.png)",
        "",
        table(headings, rows),
        "",
        "The mean's gradient is an identity: noise / std, slope -1. The parameters' gradient follows n_t, more steeply "
        "than in proportion, because the velocity's Jacobian applied to noise, which no formula predicts, is not the "
        "same at every sigma. 1 / std alone does not predict it. `equalized` multiplies each step's norm by the "
        "equalizer's median(n) / n_t: what it leaves is that Jacobian.",
    ]


def _noise(shape: tuple[int, ...], video: int, step: int | None = None) -> torch.Tensor:
    """[1, C, F, H, W] of a video, at its start or for a step."""
    place = (SEED, 0, video, 0)
    drawn = initial_noise(*place, shape) if step is None else step_noise(*place, step, shape)
    return torch.from_numpy(drawn)[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "experiments")
    parser.add_argument("--prompts", type=int, default=12, help="of assets/shapes/prompts_held_out.txt")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    shapes = ROOT / "assets" / "shapes"
    lines = (shapes / "prompts_held_out.txt").read_text("utf-8").splitlines()
    spread = [lines[round(i)] for i in np.linspace(0, len(lines) - 1, parsed.prompts)]
    parsed.out.mkdir(parents=True, exist_ok=True)
    file = parsed.out / FILE
    file.write_text(json.dumps(measure(shapes / "policy", spread)) + "\n", "utf-8")
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
