"""The scheduler's line of one request: which answer serves which choice."""

from array import array

import pytest

from vtoken.policies import Choice, MassNeed
from vtoken_torch.vllm_plugin.mass.book import MassBook, RequestMass
from vtoken_torch.vllm_plugin.mass.orders import Masses, Question

ASKED = Choice(4, "mass", 1, ((2, 9),))


def answered(victims, choice=ASKED, num_known=10):
    mass = RequestMass(MassNeed())
    mass.expect(1)
    number = mass.asked(num_known)
    mass.known(1, num_known)
    mass.answered(number, Question(choice, ()), array("i", victims))
    return mass


def test_an_answer_serves_the_choice_that_was_asked_for_and_smaller_ones():
    mass = answered([7, 3, 8, 5])
    assert mass.victims(ASKED) == [3, 5, 7, 8]
    assert mass.victims(Choice(2, "mass", 1, ((2, 9),))) == [3, 7]
    assert mass.victims(Choice(2, "mass", 1, ((2, 7),))) == [3, 5]
    assert mass.victims(Choice(1, "mass", 1, ((2, 4), (6, 7)))) == [3]


@pytest.mark.parametrize(
    "choice",
    [
        Choice(5, "mass", 1, ((2, 9),)),  # the fifth was not named
        Choice(3, "mass", 1, ((2, 7),)),  # nor the third below 7
        Choice(1, "mass", 1, ((2, 10),)),  # 9 was not ranked
        Choice(1, "mass", 3, ((2, 9),)),
        Choice(1, "above_mean", 1, ((2, 9),)),
    ],
    ids=str,
)
def test_a_choice_that_the_answer_does_not_hold_finds_nobody(choice):
    assert answered([7, 3, 8, 5]).victims(choice) is None


def test_an_answer_that_names_everybody_serves_any_number():
    assert answered([7, 3]).victims(Choice(9, "mass", 1, ((2, 8),))) == [3, 7]
    assert answered([]).victims(ASKED) == []


def test_what_was_chosen_since_the_question_is_not_chosen_again():
    mass = answered([7, 3, 8, 5])
    mass.forget([3])
    assert mass.victims(Choice(2, "mass", 1, ((2, 9),))) == [7, 8]
    assert mass.victims(ASKED) is None  # three are left
    first, question = mass.asked(12), Question(ASKED, ())
    mass.forget([7])
    second = mass.asked(13)
    mass.answered(first, question, array("i", [5, 7, 8, 6]))
    assert mass.victims(Choice(3, "mass", 1, ((2, 9),))) == [5, 6, 8]
    mass.answered(second, question, array("i", [6, 7, 8, 5]))  # it was told of all that were chosen
    assert mass.victims(ASKED) == [5, 6, 7, 8]


def test_an_answer_is_stale_once_a_later_result_is_back():
    mass = answered([7, 3, 8, 5])
    mass.expect(1)
    assert mass.victims(ASKED) == [3, 5, 7, 8]
    mass.known(1, 11)
    assert mass.victims(ASKED) is None


def test_a_choice_without_an_answer_asks_for_one():
    book = MassBook()
    book.open(0, MassNeed())
    assert book.lowest(0, None, ASKED) == ()
    assert book[0].is_wanted
    book[0].asked(10)
    assert not book[0].is_wanted


def test_masses_are_handed_on_by_position():
    nan = float("nan")
    mass = RequestMass(MassNeed(window=2, rows=True))
    mass.answered(
        mass.asked(4),
        Question(None, ()),
        Masses(array("i", [0, 2, 3]), array("d", [1.0, 2.0, nan]), [array("d", [0.5, nan, nan])]),
    )
    assert mass.victims(ASKED) is None
    scores, (row,) = mass.scores([2, 0, 7])
    assert scores[:2] == [2.0, 1.0]
    assert scores[2] != scores[2]
    assert row[1] == 0.5
