"""The model against hand-drawn worlds: what it says must be right without any executor."""

import ast
from pathlib import Path

import pytest

import vtoken_conformance
from vtoken.errors import PoolExhausted
from vtoken.executor import KVSpec
from vtoken_conformance.model import Model
from vtoken_conformance.state import Change, Refusal

FOLDER = Path(vtoken_conformance.__file__).parent

# What the model's own files may take from vtoken: names, records of the protocol, errors. No table, planner or pool.
MODEL_FILES = ("model.py", "state.py", "planning.py", "bits.py", "attention.py", "fingerprint.py")
INNOCENT = {"vtoken.types", "vtoken.errors", "vtoken.executor"}


def make_model(regime="ordered", num_blocks=9, max_num_reqs=4):
    spec = KVSpec(
        num_layers=1,
        num_kv_heads=1,
        num_query_heads=1,
        head_size=2,
        dtype="float32",
        block_size=4,
        num_blocks=num_blocks,
        max_num_reqs=max_num_reqs,
        regime=regime,
    )
    return Model(spec)


def tokens(model, *numbers):
    return [bytes([number]) * model.spec.token_bytes for number in numbers]


@pytest.mark.parametrize("name", MODEL_FILES)
def test_the_model_imports_no_table_planner_or_pool(name):
    tree = ast.parse((FOLDER / name).read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    own = {f"vtoken_conformance.{Path(file).stem}" for file in MODEL_FILES}
    assert {module for module in imported if module.startswith("vtoken")} <= INNOCENT | own


def test_an_append_fills_rows_from_the_cursor():
    model = make_model()
    model.admit("a")
    model.append("a", tokens(model, 10, 11, 12, 13, 14))
    request = model.requests["a"]
    assert request.rows == [[0, 1, 2, 3], [4, None, None, None]]
    assert (request.cursor, request.num_computed, model.num_free) == (5, 5, 6)
    assert request.kv[4] == bytes([14]) * 16


def test_an_append_beyond_the_pool_is_refused_with_pool_exhausted_and_changes_nothing():
    model = make_model(num_blocks=3)
    model.admit("a")
    with pytest.raises(Refusal) as caught:
        model.append("a", tokens(model, *range(9)))
    assert (caught.value.rule, caught.value.error) == ("Q-5", PoolExhausted)
    assert model.requests["a"].rows == []


def test_a_kill_leaves_a_hole_and_a_recycle_fills_the_doomed_slot():
    model = make_model()
    model.admit("a")
    model.append("a", tokens(model, *range(6)))
    assert model.kill("a", [1, 1, 4]) == [1, 4]
    model.doom("a", [5, 2])
    model.recycle("a", tokens(model, 99))
    assert model.requests["a"].rows == [[0, None, 2, 3], [None, 6, None, None]]
    assert model.requests["a"].doomed == [2]
    assert model.requests["a"].cursor == 6


def test_a_fork_shares_blocks_but_not_rows():
    model = make_model()
    model.admit("a")
    model.append("a", tokens(model, *range(8)))
    model.fork_prefix("a", "b", 8)
    model.kill("b", [0])
    assert model.requests["a"].rows[0] == [0, 1, 2, 3]
    assert model.requests["b"].rows[0] == [None, 1, 2, 3]
    assert (len(model.held()), model.num_free) == (2, 6)
    assert model.num_holders(model.requests["a"].blocks[0]) == 2


def test_blocks_are_held_until_their_last_holder_is_gone():
    model = make_model()
    model.admit("a")
    model.append("a", tokens(model, *range(5)))
    model.fork_prefix("a", "b", 4)
    model.finish("a")
    assert (len(model.held()), model.num_free) == (1, 7)
    model.finish("b")
    assert (len(model.held()), model.num_free) == (0, 8)


def test_a_change_moves_tokens_drops_blocks_and_packs():
    model = make_model()
    model.admit("a")
    model.append("a", tokens(model, *range(8)))
    model.kill("a", [0, 1, 2, 6])
    first, second = model.requests["a"].blocks
    model.apply("a", Change((second,), 0, {4: (first, 0), 5: (first, 1), 7: (first, 2)}, packed=True))
    request = model.requests["a"]
    assert request.rows == [[4, 5, 7, 3]]
    assert (request.cursor, request.is_packed(), model.num_free) == (4, True, 7)


def test_a_change_that_does_not_pack_puts_fresh_blocks_before_the_tail():
    model = make_model()
    model.admit("a")
    model.append("a", tokens(model, *range(9)))
    model.kill("a", [0, 1, 2, 5, 6, 7])
    first, second, tail = model.requests["a"].blocks
    (fresh,) = model.apply("a", Change((first, second), 1, {3: (0, 0), 4: (0, 1)}, packed=False))
    request = model.requests["a"]
    assert request.blocks == [fresh, tail]
    assert request.rows == [[3, 4, None, None], [8, None, None, None]]
    assert request.cursor == 5


def test_fenced_blocks_wait_for_advance_and_reap():
    model = make_model(regime="fenced")
    model.admit("a")
    model.append("a", tokens(model, *range(5)))
    first = model.requests["a"].blocks[0]
    model.kill("a", range(4))
    model.apply("a", Change((first,), 0, {}, packed=False))
    assert (model.num_free, model.in_flight(), model.due()) == (6, [first], [])
    assert model.requests["a"].plan_in_flight
    model.advance()
    assert (model.num_free, model.due(), model.requests["a"].plan_in_flight) == (6, [first], False)
    model.reap([first])
    assert (model.num_free, model.in_flight()) == (7, [])


def test_a_request_that_ends_in_flight_fences_its_blocks():
    model = make_model(regime="fenced")
    model.admit("a")
    model.append("a", tokens(model, *range(5)))
    model.kill("a", range(4))
    model.apply("a", Change((model.requests["a"].blocks[0],), 0, {}, packed=False))
    model.finish("a")
    assert (model.num_free, len(model.in_flight())) == (6, 2)


def test_blocks_freed_in_a_pass_are_no_targets_until_it_ends():
    model = make_model(num_blocks=4)
    model.admit("a")
    model.append("a", tokens(model, *range(5)))
    for block_id, block in enumerate(model.requests["a"].blocks, start=1):
        block.block_id = block_id
    model.finish("a")
    assert (model.free_ids(), model.target_ids()) == ({1, 2, 3}, {3})
    model.advance()
    assert model.target_ids() == {1, 2, 3}


@pytest.mark.parametrize(
    ("rule", "call"),
    [
        ("T-8", lambda model: model.admit("a")),
        ("T-8", lambda model: model.known("x")),
        ("T-8", lambda model: model.kill("a", [0, 6])),
        ("T-8", lambda model: model.append("a", [])),
        ("T-8", lambda model: model.append("a", [b"short"])),
        ("T-4", lambda model: model.doom("a", [2, 2])),
        ("T-4", lambda model: model.doom("a", [1])),
        ("C-3", lambda model: model.recycle("a", [bytes(16)])),
        ("Q-2", lambda model: model.fork_prefix("a", "b", 4)),
        ("Q-2", lambda model: model.fork_prefix("a", "b", 3)),
        ("Q-2", lambda model: model.fork_prefix("a", "b", 8)),
    ],
)
def test_what_the_spec_forbids_is_refused_by_its_rule(rule, call):
    model = make_model()
    model.admit("a")
    model.append("a", tokens(model, *range(6)))
    model.kill("a", [1])
    with pytest.raises(Refusal) as caught:
        call(model)
    assert caught.value.rule == rule
    assert model.requests.keys() == {"a"}
    assert model.requests["a"].rows == [[0, None, 2, 3], [4, 5, None, None]]


def test_rows_are_limited():
    model = make_model(max_num_reqs=1)
    model.admit("a")
    with pytest.raises(Refusal, match="all 1 request rows"):
        model.admit("b")
