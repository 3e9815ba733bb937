"""The wanted number of rollout groups, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_ray.pool_size import Load, needed_groups, wanted_groups

LONG_AGO, COOLDOWN_S = 1000.0, 60.0


@pytest.mark.parametrize(
    ("rollout_s", "update_s", "queue", "now", "expected", "why"),
    [
        (40, 10, 0.0, 2, 4, "4 groups make 40 s of work in the 10 s of an update"),
        (41, 10, 0.0, 2, 5, "rounded up"),
        (40, 10, 0.0, 4, 4, "as many as are needed"),
        (400, 10, 0.0, 4, 8, "at most 8"),
        (40, 10, 0.6, 2, 2, "the reward service is behind: more videos would only wait"),
        (10, 10, 0.0, 4, 2, "1 is needed, 1.25 with room"),
        (35, 10, 0.0, 4, 4, "3.5 are needed, 4.4 with room"),
        (30, 10, 0.0, 5, 4, "3 are needed, 3.75 with room"),
        (1, 10, 0.0, 5, 2, "at least 2"),
        (40, 0, 0.0, 3, 8, "the learner takes no time"),
    ],
)
def test_table(rollout_s: float, update_s: float, queue: float, now: int, expected: int, why: str) -> None:
    load = Load(rollout_s, update_s, queue)
    assert wanted_groups(load, now, 2, 8, LONG_AGO, COOLDOWN_S) == expected, why
    assert wanted_groups(load, now, 2, 8, COOLDOWN_S - 1, COOLDOWN_S) == now, "it was changed just now"


@given(
    load=st.builds(Load, *(st.floats(0, 1e4),) * 2, st.floats(0, 2)),
    now=st.integers(1, 40),
    least=st.integers(1, 10),
    room=st.integers(0, 20),
)
def test_it_stays_inside_and_comes_to_rest(load: Load, now: int, least: int, room: int) -> None:
    most = least + room
    first = wanted_groups(load, now, least, most, LONG_AGO, COOLDOWN_S)
    assert least <= first <= most
    second = wanted_groups(load, first, least, most, LONG_AGO, COOLDOWN_S)
    assert wanted_groups(load, second, least, most, LONG_AGO, COOLDOWN_S) == second
    if load.queue < 0.5:
        assert second >= min(most, needed_groups(load))
