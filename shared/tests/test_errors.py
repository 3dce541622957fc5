from vtoken.errors import InvariantError, PoolExhausted, SpecError


def test_a_callers_mistake_is_a_value_error() -> None:
    assert issubclass(SpecError, ValueError)


def test_an_exhausted_pool_can_be_told_from_other_mistakes_and_caught_with_them() -> None:
    assert issubclass(PoolExhausted, SpecError)


def test_a_bug_of_ours_is_never_taken_for_a_callers_mistake() -> None:
    assert not issubclass(InvariantError, ValueError)
