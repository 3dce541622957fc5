"""Recycles that go on by themselves: how many deaths in a row serve, and what follows from the request's count."""

from collections import deque
from types import SimpleNamespace

import pytest


@pytest.mark.parametrize(
    ("deaths", "num"),
    [
        ([(8, 0), (9, 1), (10, 2)], 3),
        ([(8, 0), (9, 1), (11, 2)], 2),  # nobody dies at 10: that token is appended
        ([(8, 0), (9, 1), (9, 2)], 1),  # two at 9: a plan must follow
        ([(9, 0)], 0),
        ([(7, 0), (9, 1)], 2),  # overdue: dies now
        ([], 0),
    ],
)
def test_deaths_serve_as_long_as_one_comes_at_each_count(deaths, num):
    from vtoken_torch.vllm_plugin.recycling import num_in_turn

    assert num_in_turn(deaths, 8) == num


def test_all_but_the_deaths_follows_from_the_count():
    from vtoken_torch.vllm_plugin.recycling import Recycling

    request = SimpleNamespace(num_computed_tokens=10)
    recycling = Recycling(request, first=8, num_dead=3, slots=[40, 17, 22], deaths=deque())
    assert (recycling.end, recycling.num_done, recycling.num_dead_now, recycling.last_slot) == (11, 2, 5, 17)
    request.num_computed_tokens = 11
    assert (recycling.num_done, recycling.num_dead_now, recycling.last_slot) == (3, 6, 22)
