"""A user's scorer: found by import path, refused with words when it is wrong, every result checked."""

import numpy as np
import pytest

from sage_ray.rewards.scorer import Scorer
from sage_ray.rewards.user_scorer import CheckedScorer, load_user_scorer

MODULE = """
import numpy as np

NUMBER = 3

class Brightness:
    parts = ["mean", "spread"]
    def __init__(self, scale=1.0):
        if scale < 0:
            raise RuntimeError("scale is\\nnegative")
        self.scale = scale
    def score(self, videos, prompts, fps):
        return np.array([[v.mean() * self.scale, v.std()] for v in videos], np.float32)

def make(scale):
    return Brightness(scale)

class NoScore:
    parts = ("a",)

class NoParts:
    def score(self, videos, prompts, fps): ...
"""
CLIPS = [np.full((4, 8, 8, 3), value, np.uint8) for value in (10, 30)]


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "mine_for_test.py").write_text(MODULE)
    (tmp_path / "broken_for_test.py").write_text("import not_there_for_test\n")
    (tmp_path / "raising_for_test.py").write_text("raise KeyError('oh')\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("name", ["mine_for_test:Brightness", "mine_for_test:make"])
def test_loads_and_scores(name):
    scorer = load_user_scorer(name, {"scale": 0.5})
    assert isinstance(scorer, Scorer)
    assert scorer.parts == ("mean", "spread")
    scores = scorer.score(CLIPS, ["a", "b"], 8.0)
    assert scores.dtype == np.float64
    assert scores.tolist() == [[5.0, 0.0], [15.0, 0.0]]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mine_for_test", 'must be "module:Class"'),
        ("mine_for_test:", 'must be "module:Class"'),
        (":Brightness", 'must be "module:Class"'),
        ("..mine_for_test:Brightness", 'must be "module:Class"'),
        ("mine_for_test:Brightness:x", 'must be "module:Class"'),
        ("nowhere_for_test:A", "nowhere_for_test cannot be imported.*No module named 'nowhere_for_test'"),
        ("broken_for_test:A", "broken_for_test cannot be imported.*No module named 'not_there_for_test'"),
        ("raising_for_test:A", "cannot be imported: KeyError: 'oh'"),
        ("mine_for_test:Missing", "module mine_for_test has no attribute Missing"),
        ("mine_for_test:NUMBER", "NUMBER is a int, must be a class or a callable"),
        ("mine_for_test:NoScore", "must have a method score.*NoScore has none"),
        ("mine_for_test:NoParts", "must have parts.*NoParts has none"),
    ],
)
def test_wrong_name(name, words):
    with pytest.raises(ValueError, match=words) as error:
        load_user_scorer(name, {})
    assert str(error.value).startswith(f"kind={name!r}: ")


def test_wrong_options():
    with pytest.raises(
        ValueError, match=r"^kind='mine_for_test:Brightness': the constructor failed: TypeError: .*sacle"
    ):
        load_user_scorer("mine_for_test:Brightness", {"sacle": 1})
    with pytest.raises(ValueError, match="failed: RuntimeError: scale is negative$"):
        load_user_scorer("mine_for_test:Brightness", {"scale": -1})


class Fixed:
    """Returns what it was given."""

    def __init__(self, result, parts=("a", "b")):
        self.result, self.parts = result, parts

    def score(self, videos, prompts, fps):
        return self.result


@pytest.mark.parametrize("parts", [(), [], "ab", ("a", "a"), ("a", ""), ("a", 1), None, {"a", "b"}, (["a"],)])
def test_wrong_parts(parts):
    with pytest.raises(ValueError, match="^mine: parts must be a non-empty tuple or list of distinct"):
        CheckedScorer(Fixed(None, parts), "mine")


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "returned NoneType"),
        ([[1.0, 2.0], [3.0, 4.0]], "returned list"),
        (np.ma.masked_invalid(np.ones((2, 2))), "returned MaskedArray"),
        (np.ones((2, 2), np.int64), r"returned int64 \[2, 2\]"),
        (np.ones((2, 2), bool), r"returned bool \[2, 2\]"),
        (np.ones((2, 2), complex), r"returned complex128 \[2, 2\]"),
        (np.ones((2, 2), object), r"returned object \[2, 2\]"),
        (np.ones((1, 2)), r"returned float64 \[1, 2\]"),
        (np.ones((2, 3)), r"returned float64 \[2, 3\]"),
        (np.ones(2), r"returned float64 \[2\]"),
    ],
)
def test_wrong_result(result, words):
    rule = r"^mine: score must return a plain numpy array of floats \[2, 2\], "
    with pytest.raises(ValueError, match=rule + words):
        CheckedScorer(Fixed(result), "mine").score(CLIPS, ["a", "b"], 8.0)


def test_numbers_that_are_not_finite_stay():
    result = np.array([[np.nan, np.inf], [-np.inf, 1.0]], np.float16)
    scores = CheckedScorer(Fixed(result), "mine").score(CLIPS, ["a", "b"], 8.0)
    np.testing.assert_array_equal(scores, [[np.nan, np.inf], [-np.inf, 1.0]])


def test_result_is_a_copy():
    result = np.ones((2, 2))
    scores = CheckedScorer(Fixed(result), "mine").score(CLIPS, ["a", "b"], 8.0)
    result[:] = 0
    assert scores.min() == 1
