"""The vote page is blind, and its count gives what a voter of known taste prefers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sage_ray.preference.page import blind_pairs, key_path, write_kit
from sage_ray.preference.votes import read_key, read_votes, simulated_votes, win_rates

PROMPTS = [f"a clip number {i}" for i in range(40)]


def kit(tmp_path: Path) -> Path:
    files = {}
    for name in ("sage", "flow"):
        (tmp_path / name).mkdir()
        files[name] = [tmp_path / name / f"{i}.mp4" for i in range(len(PROMPTS))]
        for i, file in enumerate(files[name]):
            file.write_bytes(f"{name} {i}".encode())
    write_kit(tmp_path / "kit", files, PROMPTS, seed=3)
    return tmp_path / "kit"


def test_what_voters_get_names_no_policy(tmp_path: Path) -> None:
    folder = kit(tmp_path)
    page = (folder / "index.html").read_text()
    assert "sage" not in page and "flow" not in page
    assert not any("sage" in file.name or "flow" in file.name for file in folder.rglob("*"))
    assert not (folder / key_path(folder).name).exists()
    assert page.count("<video") == 80 and page.count("<fieldset>") == 120
    assert "http" not in page


def test_the_key_says_whose_video_is_shown_where(tmp_path: Path) -> None:
    folder = kit(tmp_path)
    _, pairs = read_key(key_path(folder))
    for pair in pairs:
        place = PROMPTS.index(pair.prompt)
        assert (folder / "videos" / f"{pair.number:03d}_A.mp4").read_text() == f"{pair.first} {place}"
        assert (folder / "videos" / f"{pair.number:03d}_B.mp4").read_text() == f"{pair.second} {place}"


def test_each_policy_is_first_in_half_of_the_pairs() -> None:
    pairs = blind_pairs(PROMPTS, ("sage", "flow"), 5)
    assert sum(pair.first == "sage" for pair in pairs) == 20
    assert sorted(pair.prompt for pair in pairs) == sorted(PROMPTS)
    assert [pair.prompt for pair in pairs] != PROMPTS


def test_a_simulated_voter_finds_the_better_policy_on_the_axis_where_it_is_better() -> None:
    """Of two normal scores 1 apart, each seen with its own part of a noise of 1, the higher wins Phi(1) = 84 %; ties,
    within .1 of each other and counted half, take little of it."""
    many = [f"clip {i}" for i in range(2000)]
    pairs = blind_pairs(many, ("sage", "flow"), 0)
    truth = {prompt: {"sage": (1.0, 0.0, -1.0), "flow": (0.0, 0.0, 0.0)} for prompt in many}
    rates = win_rates("sage", pairs, [simulated_votes(pairs, truth, noise=1.0, seed=1)])
    assert [rate.axis for rate in rates] == ["VQ", "MQ", "TA"]
    assert [rate.rate.mean for rate in rates] == pytest.approx([0.84, 0.5, 0.16], abs=0.03)
    vq, mq, ta = (rate.rate for rate in rates)
    assert vq.low > 0.5 > ta.high and mq.low < 0.5 < mq.high
    other = win_rates("flow", pairs, [simulated_votes(pairs, truth, noise=1.0, seed=1)])
    assert other[0].rate.mean == pytest.approx(1 - vq.mean)


def test_a_voter_without_noise_is_always_right() -> None:
    pairs = blind_pairs(PROMPTS, ("sage", "flow"), 0)
    truth = {prompt: {"sage": (1.0, 1.0, 0.0), "flow": (0.0, 2.0, 1e-9)} for prompt in PROMPTS}
    rates = win_rates("sage", pairs, [simulated_votes(pairs, truth, noise=0.0, seed=1)])
    assert [rate.rate.mean for rate in rates] == [1.0, 0.0, 0.0]


def test_several_voters_on_one_pair_are_one_prompt() -> None:
    pairs = blind_pairs(PROMPTS[:4], ("sage", "flow"), 0)
    votes = [[{"pair": p.number, "axis": axis, "vote": "A"} for p in pairs for axis in ("VQ", "MQ", "TA")]]
    once, often = win_rates("sage", pairs, votes)[0], win_rates("sage", pairs, votes * 30)[0]
    assert (once.votes, often.votes) == (4, 120)
    assert np.allclose(once.rate, often.rate)


@pytest.mark.parametrize(
    ("votes", "words"),
    [
        ([{"pair": 0, "axis": "VQ", "vote": "C"}], "vote of A, B, tie"),
        ([{"pair": 9, "axis": "VQ", "vote": "A"}], "pair must be one of the kit's 0 to 3"),
        ([{"pair": 0, "axis": "XX", "vote": "A"}], "axis must be one of VQ, MQ, TA"),
        ([{"pair": 0, "axis": "VQ", "vote": "A"}, {"pair": 0, "axis": "VQ", "vote": "B"}], "voted on twice"),
    ],
)
def test_a_faulty_votes_file_is_one_error(tmp_path: Path, votes: list, words: str) -> None:
    pairs = blind_pairs(PROMPTS[:4], ("sage", "flow"), 0)
    (tmp_path / "votes.json").write_text(json.dumps({"votes": votes}))
    with pytest.raises(ValueError, match=words):
        read_votes(tmp_path / "votes.json", pairs)


def test_a_kit_needs_two_policies_with_a_video_for_every_prompt(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be two with one video for each of 2 prompts"):
        write_kit(tmp_path / "kit", {"sage": [], "flow": []}, ["a", "b"])
