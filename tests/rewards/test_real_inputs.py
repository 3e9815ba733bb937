"""Real clips and real prompts (tests/data/videoalign, MIT) through the golden checkpoint."""

import csv
from pathlib import Path

import numpy as np
import pytest

from sage_ray.rewards.video_input import read_video
from tests.rewards.golden import clip

DATA = Path(__file__).parents[1] / "data" / "videoalign"
EXAMPLES = {
    f"{Path(row[f'path_{side}']).name}": (row["prompt"], float(row[f"fps_{side}"]), float(row[f"num_frames_{side}"]))
    for row in csv.DictReader((DATA / "example.csv").open(encoding="utf-8"))
    for side in "AB"
}


def prompts() -> list[str]:
    """Every prompt of both evaluation files, the Chinese and the short ones too."""
    texts = []
    for name in ("TA_hard.csv", "videogen_eval.csv"):
        with (DATA / name).open(encoding="utf-8") as file:
            texts += [text for row in csv.DictReader(file) for text in row.values() if text]
    return texts


@pytest.mark.parametrize("name", ["example_1_A.mp4", "example_1_B.mp4", "example_2_A.mp4", "example_3_B.mp4"])
def test_a_real_file_scores_as_its_frames(golden_model, name):
    frames, fps = read_video(DATA / name)
    prompt, stated_fps, stated_frames = EXAMPLES[name]
    assert fps == pytest.approx(stated_fps, abs=0.01) and len(frames) == stated_frames
    scores = golden_model.score([frames], [prompt], fps).numpy()
    assert scores.shape == (1, 3) and np.isfinite(scores).all()
    again = golden_model.score([frames.copy()], [prompt], fps).numpy()
    np.testing.assert_array_equal(scores, again)


def test_every_real_prompt_scores_without_error(golden_model):
    texts, frames = prompts(), clip(1, 4, 28, 28)
    assert len(texts) > 1200
    scores = np.concatenate(
        [golden_model.score([frames] * len(part), part, 8.0).numpy() for part in np.array_split(texts, 64)]
    )
    assert scores.shape == (len(texts), 3) and np.isfinite(scores).all()
    assert len(np.unique(scores[:, 2].round(9))) > 0.95 * len(set(texts))
    assert np.ptp(scores[:, :2], axis=0).max() < 1e-3  # VQ and MQ come before the prompt


@pytest.mark.parametrize(
    "prompt",
    [
        "{braces} {0} {text_prompt}",
        "emoji 🎈🐈‍⬛",
        "line\nbreak\r\ttab",
        " blanks around ",
        "",
        "\u200bzero width\ufeff",
        "é" * 3000,
    ],
)
def test_odd_prompts_score(golden_model, prompt):
    frames = clip(2, 5, 40, 56)
    one = golden_model.score([frames], [prompt], 8.0).numpy()
    other = golden_model.score([frames], ["a boat"], 8.0).numpy()
    assert np.isfinite(one).all() and one[0, 2] != other[0, 2]
    np.testing.assert_allclose(one[:, :2], other[:, :2], atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 1, 1), (3, 1, 200), (5, 199, 1), (7, 1080, 1920), (2, 17, 3000), (300, 8, 8)])
def test_odd_sizes_score(golden_model, shape):
    frames = clip(3, *shape)
    scores = golden_model.score([frames], ["a boat"], 24.0).numpy()
    assert np.isfinite(scores).all()


def test_any_order_and_any_batch_gives_the_same_scores(golden_model):
    clips = [clip(number, 4 + number, 28 + 8 * (number % 3), 56) for number in range(6)]
    texts = [f"{'a long prompt ' * number}{number}" for number in range(6)]
    together = golden_model.score(clips, texts, 8.0).numpy()
    order = [3, 0, 5, 1, 4, 2]
    mixed = golden_model.score([clips[i] for i in order], [texts[i] for i in order], 8.0).numpy()
    single = np.concatenate([golden_model.score([c], [t], 8.0).numpy() for c, t in zip(clips, texts, strict=True)])
    np.testing.assert_allclose(mixed, together[order], atol=1e-4)
    np.testing.assert_allclose(single, together, atol=1e-4)
