from collections.abc import Callable
from math import nan

from vtoken.policies import RequestView
from vtoken.policies.paged_eviction import PagedEvictionPolicy

MakeView = Callable[..., RequestView]


def victims(view: RequestView) -> list[int]:
    return list(PagedEvictionPolicy().select_victims(view))


def test_the_page_with_the_lowest_mean_goes_as_a_whole(make_view: MakeView) -> None:
    mass = [1.0, 1.0, 0.0, 5.0, 2.0, 0.0, 1.0, 1.0]
    assert victims(make_view(8, page_size=2, kv_budget=7, recent=0, mass=mass)) == [0, 1]
    assert victims(make_view(8, page_size=2, kv_budget=5, recent=0, mass=mass)) == [0, 1, 4, 5]


def test_more_than_the_excess_goes_if_it_is_no_multiple_of_a_page(make_view: MakeView) -> None:
    assert victims(make_view(16, page_size=4, kv_budget=11, mass=[1.0] * 16)) == list(range(8))


def test_a_page_with_a_sink_a_protected_a_recent_or_an_unscored_token_stays(make_view: MakeView) -> None:
    mass = [1.0] * 22
    mass[13] = nan
    view = make_view(22, page_size=4, kv_budget=4, num_sinks=1, protected=((6, 7),), recent=3, mass=mass)
    assert victims(view) == [8, 9, 10, 11]  # pages 0: sink, 1: protected, 3: unscored, 4: recent, 5: being filled


def test_the_page_being_filled_stays_even_with_no_recent_window(make_view: MakeView) -> None:
    assert victims(make_view(10, page_size=4, kv_budget=2, recent=0, mass=[1.0] * 10)) == list(range(8))


def test_the_newest_page_stays_by_default(make_view: MakeView) -> None:
    assert victims(make_view(12, page_size=4, kv_budget=4, mass=[1.0] * 8 + [0.0] * 4)) == list(range(8))


def test_a_page_with_a_dead_token_is_no_page_even_if_its_ends_are_live(make_view: MakeView) -> None:
    live = [0, 1, 2, 4, 7, 8, 9, 10, 11, 15]
    view = make_view(16, live=live, page_size=4, kv_budget=2, recent=0, mass=[1.0] * 10)
    assert victims(view) == [8, 9, 10, 11]


def test_pages_start_at_multiples_of_the_page_size_not_at_the_first_live_token(make_view: MakeView) -> None:
    view = make_view(12, live=list(range(2, 12)), page_size=4, kv_budget=6, recent=0, mass=[1.0] * 10)
    assert victims(view) == [4, 5, 6, 7]
