"""Broken executors, one fault each, and the case that catches it: the proof that the suite can fail.

``vtoken conformance --executor vtoken_conformance.mutants.executors:EarlyFree`` shows one at work.
"""

from vtoken_conformance.mutants.executors import EXECUTOR_MUTANTS
from vtoken_conformance.mutants.stores import STORE_MUTANTS

__all__ = ["CAUGHT_BY", "MUTANTS"]

MUTANTS = {**EXECUTOR_MUTANTS, **STORE_MUTANTS}
"""Executors that do not conform, by name."""

CAUGHT_BY = {
    "CausalByIndex": "attention/places_in_memory_do_not_matter",
    "DoomKills": "token_table/a_doomed_token_stays_live",
    "EarlyFree": "plans/fenced_blocks_are_in_flight_until_advance_and_reap",
    "EarlyReap": "plans/two_fences_pass_one_after_the_other",
    "FingerprintByIndex": "fingerprint/memory_order_does_not_matter",
    "FirstLayerMoved": "plans/moves_reach_all_layers_and_heads",
    "ForkWithoutKV": "requests/a_fork_shares_whole_blocks",
    "FreedSharedBlock": "requests/the_last_holder_frees_a_shared_block",
    "HalfRefusedKill": "token_table/a_kill_of_an_uncomputed_position_kills_none",
    "InterleavedHeads": "attention/each_query_head_reads_its_kv_head",
    "KillInAllHolders": "requests/a_kill_in_the_child_leaves_the_parent_alone",
    "LeakAtPreempt": "requests/a_preempted_request_leaves_no_block_behind",
    "LostToken": "token_table/a_long_append_adds_all_blocks_that_it_needs",
    "MassOnKVHeads": "attention/mass_is_counted_on_query_heads",
    "NaNLeak": "attention/a_dead_token_with_nan_never_reaches_the_output",
    "OneBlockTooMany": "token_table/an_append_fills_the_last_block_before_it_adds_one",
    "PositionLeftBehind": "plans/fill_moves_the_tail_into_the_holes",
    "RecycleAtCursor": "recycle/a_recycled_token_takes_the_slot_of_the_next_doomed_one",
    "RoundedMove": "plans/a_move_keeps_every_bit_of_float32",
    "SignBitLost": "token_table/all_slots_of_a_block_of_32_can_be_live_or_dead",
    "SortedQueue": "token_table/doomed_tokens_queue_in_the_given_order",
    "StaleCursor": "plans/fill_may_move_the_cursor_alone",
    "StaleMask": "token_table/a_kill_frees_no_block",
    "StalePlan": "plans/a_plan_made_before_a_block_joined_is_refused",
    "SwappedKV": "attention/a_query_sees_the_tokens_up_to_its_position",
    "TakesWhatFits": "requests/an_append_that_does_not_fit_changes_nothing",
    "Unscaled": "attention/all_query_heads_read_the_one_kv_head",
    "WrongSlot": "token_table/an_append_takes_the_slots_from_the_cursor_on",
}
"""The case that must catch each of them."""
