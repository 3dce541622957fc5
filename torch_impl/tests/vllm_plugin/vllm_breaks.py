"""Ways to break an engine on purpose, each once, while it serves three requests."""

from array import array
from dataclasses import replace

import numpy as np
from vllm_watch import BLOCK

from vtoken_torch.vllm_plugin.parts import WorkerPart
from vtoken_torch.vllm_plugin.record import Recycles


class Saboteur:
    """Breaks an engine once, while it serves three requests, called 0, 1 and 2 here."""

    def __init__(self, engine, monkeypatch):
        self.scheduler, self.pool = engine.scheduler, engine.pool
        self.ledger, self.side = engine.scheduler.vtoken.ledger, engine.runner.vtoken
        self.is_done = False
        self.replace = monkeypatch.setattr
        self.first_key = len(engine.outcomes)
        self.first_pass = self.ledger.pool.pass_number

    def req_id(self, key):
        name = str(self.first_key + key)
        return next(req_id for req_id in self.scheduler.requests if req_id.split("-")[0] == name)

    def table(self, key):
        return self.ledger.table(self.req_id(key))

    def blocks(self, key):
        return self.ledger.manager.req_to_blocks[self.req_id(key)]

    def in_a_pass(self, do, when=lambda record: True):
        """``do(record)`` once all three requests decode: what the scheduler's side decided is there, unchecked."""
        take = self.ledger.take_record

        def take_and_break():
            record = take()
            if (
                not self.is_done
                and len(self.scheduler.running) == 3
                and record.number > self.first_pass + 12
                and when(record)
            ):
                self.is_done = True
                do(record)
            return record

        self.replace(self.ledger, "take_record", take_and_break)

    def at_a_move(self, change):
        """``change(src, dst)`` gives what the mover copies instead, at the first move of three tokens or more."""
        mover, move = self.side.mover, self.side.mover.move

        def broken_move(src, dst):
            if not self.is_done and len(src) >= 3 and len(self.scheduler.running) == 3:
                self.is_done = True
                src, dst = change(list(src), list(dst))
            move(src, dst)

        self.replace(mover, "move", broken_move)


def drop_a_copy(saboteur):
    saboteur.at_a_move(lambda src, dst: (src[1:], dst[1:]))


def swap_two_tokens(saboteur):
    saboteur.at_a_move(lambda src, dst: ([src[1], src[0], *src[2:]], dst))


def write_a_wrong_slot(saboteur):
    """The copy lands on a live token of somebody else."""

    def astray(src, dst):
        table = next(saboteur.table(key) for key in range(3) if dst[0] // BLOCK not in saboteur.table(key).block_ids)
        return src, [next(slot for slot in table.live_slots() if slot not in dst), *dst[1:]]

    saboteur.at_a_move(astray)


def copy_after_the_forward(saboteur):
    """The bytes arrive, but the step has read and written without them."""
    copies, begin_sampling, late = saboteur.side.copies, saboteur.side.begin_sampling, []
    run_copies = copies.run

    def hold_back(record):
        if not saboteur.is_done and len(record.src_slots) >= 3 and len(saboteur.scheduler.running) == 3:
            saboteur.is_done = True
            late.append(record)
        else:
            run_copies(record)

    def copy_then_sample():
        while late:
            run_copies(late.pop())
        begin_sampling()

    saboteur.replace(copies, "run", hold_back)
    saboteur.replace(saboteur.side, "begin_sampling", copy_then_sample)


def skip_a_number(saboteur):
    """As if the workers had missed a record, or met two in the wrong order."""

    def do(record):
        record.number += 1

    saboteur.in_a_pass(do)


def write_a_recycled_token_elsewhere(saboteur):
    rows = saboteur.side.runner.rows._rows
    at = rows.at

    def without_request_1(side, req_ids, counts):
        found, slots = at(side, req_ids, counts)
        if saboteur.is_done or len(slots) < 3:
            return found, slots
        saboteur.is_done = True
        others = np.arange(len(counts))[found] != rows._row_of[saboteur.req_id(1)]
        return np.arange(len(counts))[found][others], slots[others]

    saboteur.replace(rows, "at", without_request_1)


def map_two_positions_to_one_slot(saboteur):
    def do(record):
        table = saboteur.table(1)
        first, second, *_ = table.live_positions()
        table._place[second] = table._place[first]

    saboteur.in_a_pass(do)


def hold_a_block_of_another(saboteur):
    def do(record):
        saboteur.blocks(1)[0] = saboteur.blocks(2)[0]
        saboteur.table(1).block_ids[0] = saboteur.table(2).block_ids[0]

    saboteur.in_a_pass(do)


def move_the_cursor(saboteur):
    def do(record):
        saboteur.table(1).cursor += 1

    saboteur.in_a_pass(do)


def plan_for_another_layout(saboteur):
    launch = saboteur.ledger.launch

    def launch_broken(plan):
        if not saboteur.is_done and len(saboteur.scheduler.running) == 3:
            saboteur.is_done = True
            plan = replace(plan, layout_version=plan.layout_version + 1)
        launch(plan)

    saboteur.replace(saboteur.ledger, "launch", launch_broken)


def copy_over_a_live_token(saboteur):
    def do(record):
        record.src_slots.append(saboteur.table(1).slot_at(3))
        record.dst_slots.append(saboteur.table(2).slot_at(5))

    saboteur.in_a_pass(do)


def leak_a_block(saboteur):
    saboteur.in_a_pass(lambda record: saboteur.pool.get_new_blocks(1))


def free_a_held_block(saboteur):
    saboteur.in_a_pass(lambda record: saboteur.pool.free_block_queue.append(saboteur.blocks(1)[0]))


def hash_a_block_that_is_written(saboteur):
    def do(record):
        slot = saboteur.ledger.recycling[saboteur.req_id(1)].last_slot
        request = saboteur.scheduler.requests[saboteur.req_id(1)]
        block = saboteur.pool.blocks[slot // BLOCK]
        saboteur.pool._insert_block_hash(request.block_hashes[0] + b"0000", block, num_tokens=BLOCK)

    saboteur.in_a_pass(do, when=lambda record: len(saboteur.ledger.recycling) == 3)


def share_a_block_that_is_written(saboteur):
    def do(record):
        block = saboteur.pool.blocks[saboteur.ledger.recycling[saboteur.req_id(1)].last_slot // BLOCK]
        table = saboteur.table(0)
        block.ref_cnt += 1
        saboteur.blocks(0).append(block)
        table._add_blocks([block.block_id])

    saboteur.in_a_pass(do, when=lambda record: len(saboteur.ledger.recycling) == 3)


def miscount_the_dead(saboteur):
    def do(record):
        req_id, ledger = saboteur.req_id(1), saboteur.ledger
        if req_id in ledger.recycling:
            ledger.recycling[req_id].num_dead += 1
        else:
            ledger.manager.num_evicted[req_id] += 1

    saboteur.in_a_pass(do)


def miscount_the_dead_on_the_worker(saboteur):
    class Miscount(WorkerPart):
        def before_moves(self, record):
            side = saboteur.side
            if saboteur.is_done or record.num_evicted or record.recycles:
                return
            if len({*side._num_evicted, *side.recycles}) == 3:
                saboteur.is_done, req_id = True, saboteur.req_id(1)
                told = side.recycles.get(req_id) or Recycles(0, side.num_dead(req_id), array("q"))
                side.recycles[req_id] = replace(told, num_dead=told.num_dead + 1)
                side.changed.add(req_id)

    saboteur.replace(saboteur.side, "parts", [*saboteur.side.parts, Miscount()])


BREAKS = [  # what, the invariants that name it, who fails (a number: as many, whoever moves first), blocks set aside
    (drop_a_copy, {1}, 1, 0),
    (swap_two_tokens, {1}, 1, 0),
    (write_a_wrong_slot, {1}, 2, 0),
    (copy_after_the_forward, {1, 3}, [0, 1, 2], 0),
    (skip_a_number, {3}, [0, 1, 2], 0),
    (write_a_recycled_token_elsewhere, {1, 2}, [1], 0),
    (map_two_positions_to_one_slot, {2}, [1], 0),
    (hold_a_block_of_another, {1, 2, 6}, [1, 2], 2),
    (move_the_cursor, {8}, [1], 0),
    (plan_for_another_layout, {4}, 1, 0),
    (copy_over_a_live_token, {5}, [1], 0),
    (leak_a_block, {6}, [], 1),
    (free_a_held_block, {6}, [1], 1),
    (hash_a_block_that_is_written, {7}, [1], 1),
    (share_a_block_that_is_written, {7}, [0, 1], 1),
    (miscount_the_dead, {8}, [1], 0),
    (miscount_the_dead_on_the_worker, {2, 8}, [1], 0),
]
