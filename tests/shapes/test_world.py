"""The small world and its truth: what is rendered is what is read, and every defect lowers its own axis."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_ray.shapes.truth import judge
from sage_ray.shapes.world import (
    ATTRIBUTES,
    SPECS,
    VALUES,
    Defects,
    caption,
    is_held_out,
    parse_caption,
    render,
    to_uint8,
)


def clips(specs, defects: Defects | None = None, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return to_uint8(render(torch.tensor(specs), defects or Defects.none(len(specs)), generator))


def some(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    order = torch.randperm(len(SPECS), generator=torch.Generator().manual_seed(seed))
    return [SPECS[i] for i in order[:count]]


def test_there_are_864_captions_and_each_parses_back() -> None:
    assert len({caption(spec) for spec in SPECS}) == 2 * 6 * 3 * 4 * 2 * 3 == 864
    assert all(parse_caption(caption(spec)) == spec for spec in SPECS)
    with pytest.raises(ValueError, match="a dog"):
        parse_caption("a dog")


def test_a_quarter_is_held_out_and_every_value_is_on_both_sides() -> None:
    held_out = [spec for spec in SPECS if is_held_out(spec)]
    assert len(held_out) == 216
    for column, values in enumerate(VALUES):
        for side in (held_out, set(SPECS) - set(held_out)):
            assert {spec[column] for spec in side} == set(range(len(values))), ATTRIBUTES[column]


def test_prompt_files_are_the_two_sides() -> None:
    from tests.conftest import ROOT

    for name, side in (("train", False), ("held_out", True)):
        lines = (ROOT / "assets" / "shapes" / f"prompts_{name}.txt").read_text().splitlines()
        assert lines == [caption(spec) for spec in SPECS if is_held_out(spec) == side]


def test_truth_reads_every_attribute_of_clean_clips() -> None:
    truth = judge(clips(SPECS), [caption(spec) for spec in SPECS])
    assert truth.matches.float().mean() > 0.99
    for score in (truth.vq, truth.mq, truth.ta):
        assert 0.85 < score.min() and score.max() <= 1.0


@pytest.mark.parametrize("column", range(6))
def test_a_wrong_word_lowers_its_own_attribute(column: int) -> None:
    """The caption is wrong in one attribute: that score falls below the right caption's, the others stay."""
    specs = some(60, column)
    wrong = [tuple((v + 1) % len(VALUES[column]) if c == column else v for c, v in enumerate(spec)) for spec in specs]
    frames = clips(specs)
    right, off = judge(frames, [caption(s) for s in specs]), judge(frames, [caption(s) for s in wrong])
    assert not off.matches.any()
    assert (off.attributes[:, column] < right.attributes[:, column] - 0.2).all()
    others = [c for c in range(6) if c != column]
    assert torch.equal(off.attributes[:, others], right.attributes[:, others])
    assert torch.equal(off.vq, right.vq) and torch.equal(off.mq, right.mq)


@pytest.mark.parametrize(
    ("defect", "strength", "axis"),
    [
        ("blur", 4.0, "vq"),
        ("fade", 0.6, "vq"),
        ("stall", 0.6, "mq"),
        ("wobble", 2.5, "mq"),
    ],
)
def test_defects_lower_their_axis_by_degree(defect: str, strength: float, axis: str) -> None:
    specs = some(80)
    zero = torch.zeros(len(specs))
    means = []
    for level in (0.0, 0.5, 1.0):
        values = {name: zero for name in ("blur", "fade", "stall", "wobble")} | {defect: zero + level * strength}
        truth = judge(clips(specs, Defects(**values)), [caption(spec) for spec in specs])
        means.append(float(getattr(truth, axis).mean()))
    assert means[0] > means[1] + 0.02 > means[2] + 0.04


def test_an_empty_clip_scores_zero() -> None:
    truth = judge(torch.full((1, 9, 32, 32, 3), 107, dtype=torch.uint8), [caption(SPECS[0])])
    assert truth.vq == truth.mq == truth.ta == 0.0 and not truth.matches


@settings(deadline=None, max_examples=25)
@given(st.integers(0, len(SPECS) - 1), st.integers(0, 2**31 - 1))
def test_scores_stay_in_the_unit_interval_on_noise(index: int, seed: int) -> None:
    frames = torch.randint(0, 256, (2, 9, 32, 32, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    truth = judge(frames, [caption(SPECS[index])] * 2)
    for score in (truth.vq, truth.mq, truth.ta, truth.attributes):
        assert torch.isfinite(score).all() and (score >= 0).all() and (score <= 1).all()


def test_rendering_is_a_function_of_its_seed() -> None:
    assert torch.equal(clips(some(4), seed=3), clips(some(4), seed=3))
    assert not torch.equal(clips(some(4), seed=3), clips(some(4), seed=4))
