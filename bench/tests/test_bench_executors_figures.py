"""Ratios, shares, shapes and tables of the comparison; no model runs."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from time import sleep, thread_time
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("transformers")

from rich.console import Console

from vtoken_bench.executors.comparison import Elapsed, GateError, Samples, Shares, bytes_row, device_clock
from vtoken_bench.executors.markdown import markdown_tables
from vtoken_bench.executors.moves import _row, compare_moves
from vtoken_bench.executors.program import Program, make_spec
from vtoken_bench.executors.room import NoRoom, decode_shape
from vtoken_bench.executors.shapes import Shape, choose
from vtoken_bench.executors.show import comparison_table
from vtoken_bench.executors.sides import jax_side, memcpy, torch_side
from vtoken_bench.record import Row
from vtoken_bench.timing import Spread
from vtoken_jax.kv_store import JaxKVStore


def timed(*us: float) -> list[Elapsed]:
    """Calls in which one waits half the processor time."""
    return [Elapsed(each, each / 2) for each in us]


def test_ratios_and_shares_are_taken_round_by_round() -> None:
    copies = timed(1, 2, 6)
    samples = Samples(
        timed(10, 40, 30),
        timed(10, 20, 60),
        {"hf": timed(5, 10, 60)},
        {"calls": (timed(5, 20, 15), timed(2, 2, 6)), "memcpy": (copies, copies)},
        {"memcpy": timed(5, 10, 30)},
    )
    row = samples.row("move_us", {"batch": 1})
    assert (row.figure.low, row.figure.median, row.figure.high) == (0.5, 1, 2)
    assert row.shares["calls"] == Shares(0.5, 0.1)
    assert row.shares["memcpy"] == Shares(0.1, 0.1)
    assert row.shares["rest"] == pytest.approx(Shares(0.4, 0.8))
    assert row.bound_by == {"jax": "calls", "torch": "rest"}
    record = row.as_record()
    assert record["torch"] == {"value": 20.0, "spread": [10.0, 60.0]}
    assert record["hf"]["value"] == 10
    assert record["rounds"] == 3
    assert record["wall_us"]["jax"] == {"value": 15.0, "spread": [5.0, 20.0]}
    assert record["wall_us"]["hf"] == {"value": 5.0, "spread": [2.5, 30.0]}
    assert record["ratios"]["hf/jax"] == {"value": 0.5, "spread": [0.25, 2.0]}
    assert record["ratios"]["hf/torch"] == {"value": 0.5, "spread": [0.5, 1.0]}
    assert record["floors"] == {"memcpy": {"jax": 0.5, "torch": 0.5}}
    assert record.items() >= Row("move_us", "jax/torch", row.figure, params={"batch": 1}).as_record().items()


def test_parts_larger_than_the_whole_leave_no_rest() -> None:
    both = timed(60)
    row = Samples(timed(100), timed(100), parts={"matmul": (both, both)}).row(
        "step_us", {}, {"attention": Shares(0.7, 0.3)}
    )
    assert row.shares["rest"] == pytest.approx(Shares(0, 0.1))
    assert row.bound_by == {"jax": "attention", "torch": "matmul"}


def test_rates_are_of_wall_time_and_above_1_where_jax_is_faster() -> None:
    samples = Samples(timed(1000, 2000), timed(4000, 4000), {"hf": timed(8000, 8000)})
    row = samples.rates("decode_tokens_per_s", 8, {})
    assert (row.jax.low, row.jax.high) == (8000, 16000)
    assert (row.torch.median, row.others["hf"].median) == (4000, 2000)
    assert (row.figure.low, row.figure.high) == (2, 4)
    assert row.bound_by == {}


def test_the_first_round_is_dropped_everywhere_once() -> None:
    shared = timed(1, 2)
    samples = Samples(
        timed(1, 2), timed(1, 2), {"hf": timed(1, 2)}, {"memcpy": (shared, shared)}, {"memcpy": timed(1, 2)}
    )
    samples.drop_first()
    assert samples == Samples(
        timed(2), timed(2), {"hf": timed(2)}, {"memcpy": (timed(2), timed(2))}, {"memcpy": timed(2)}
    )


def decode_records() -> list[dict[str, Any]]:
    """Wide figures, as a decode shape gives them."""
    at = {"batch": 32, "live": 4096, "dtype": "bf16"}
    both = timed(96_000, 96_000)
    jax, torch, hf = (timed(us, us) for us in (2_460_000, 228_000, 31_000_000))
    samples = Samples(jax, torch, {"hf": hf}, {"matmul": (both, both)})
    rows = [
        samples.row("decode_step_us", at, {"attention": Shares(0.6, 0.3)}),
        samples.rates("decode_tokens_per_s", 32, at),
        bytes_row("decode_kv_bytes", at, 3_020_000_000, 3_020_000_000, {"hf": 3_020_000_000}),
        bytes_row("decode_memory_bytes", at, 7_100_000_000, 6_900_000_000, {"hf": 7_200_000_000}),
    ]
    return [row.as_record() for row in rows]


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_fits(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=width).print(comparison_table("", decode_records()))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    text = [" ".join(line) for line in lines]
    assert "batch 32, live 4,096, bf16" in text
    assert "decode step 2.46 s 228 ms 31.0 s 10.8 10.8-10.8 attention 60% / matmul" in " ".join(text)
    assert "hf/torch 136 136-136" in text
    assert "decode tokens/s 26.0 281 2.06 0.09 0.09-0.09 -" in text
    assert "decode memory 7.10 GB 6.90 GB 7.20 GB 1.03 once -" in text


def operation_records() -> list[dict[str, Any]]:
    at = {"batch": 1, "live": 512, "dtype": "f32"}
    samples = Samples(timed(3000), timed(1500), parts={"calls": (timed(2000), timed(300))})
    names = ("append_us", "attend_us", "fingerprint_us", "move_us")
    return [row.as_record() for row in (*(samples.row(name, at) for name in names), bytes_row("pool_bytes", at, 4, 2))]


def test_a_record_becomes_markdown_tables() -> None:
    rows = operation_records() + decode_records()
    rows[-1]["notes"] = ["half of it"]
    summary = {"device": "cpu", "clock": "processor", "threads": {"torch": 1, "xla": None}, "seconds": 600}
    packages = {"jax": "0.10.2", "torch": "2.13"}
    text = markdown_tables(
        {
            "environment": {"cpu": "An EPYC", "num_cpus": 2, "packages": packages},
            "summary": {**summary, "refused": [], "skipped": ["decode: big"]},
            "rows": rows,
        }
    )
    about, decode, operations, *rest = text.split("\n\n")
    assert about == (
        "An EPYC, 2 CPUs; cpu, processor time; threads: torch 1, xla its own; jax 0.10.2, torch 2.13, transformers -; "
        "10 minutes."
    )
    assert decode.splitlines()[2] == (
        "| batch 32, live 4,096, bf16 | 2.46 s, 228 ms, 31.0 s | 10.8 (10.8 - 10.8) | 12.6 (12.6 - 12.6) | "
        "26.0, 281, 2.06 | 3.02 GB, 3.02 GB, 3.02 GB | 7.10 GB, 6.90 GB, 7.20 GB | attention 60% / matmul 42% |"
    )
    cell = "3.00 ms, 1.50 ms; 2.00 (2.00 - 2.00); calls 67% / rest 80%"
    assert operations.splitlines()[2] == f"| batch 1, live 512, f32 |{f' {cell} |' * 4} 4 B, 2 B |"
    assert rest == ["- skipped: decode: big", "- half of it: batch 32, live 4,096, bf16"]
    for table in (decode, operations):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_the_clock_of_the_cpu_counts_other_threads_and_no_waiting() -> None:
    def busy() -> None:
        end = thread_time() + 0.03
        while thread_time() < end:
            pass

    def elsewhere() -> None:
        thread = Thread(target=busy)
        thread.start()
        thread.join()

    assert device_clock("cpu")(elsewhere).us >= 30_000
    us, wall_us = device_clock("cpu")(lambda: sleep(0.05))
    assert us < 50_000 <= wall_us
    us, wall_us = device_clock("cuda")(lambda: sleep(0.05))
    assert 50_000 <= us == wall_us


def test_moves_alone_are_checked_and_timed_beside_copies_of_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, clock = make_spec("bfloat16", 1, 640), device_clock("cpu")

    def compare() -> Any:
        return compare_moves(
            jax_side(),
            torch_side("cpu"),
            spec,
            (4, 20),
            clock,
            partial(memcpy, "cpu"),
            2,
            {"layers": 4},
            with_rows=True,
        )

    few, many = compare()
    assert [row.params for row in (few, many)] == [{"moves": 4, "layers": 4}, {"moves": 20, "layers": 4}]
    assert few.name == "store_move_us"
    assert list(few.others) == ["rows"]
    assert list(few.shares) == ["calls", "memcpy", "rest"]
    assert list(few.ratios) == ["rows/jax", "rows/torch", "jax/memcpy", "torch/memcpy"]
    monkeypatch.setattr(JaxKVStore, "move", lambda *_: None)
    with pytest.raises(GateError, match="JaxKVStore: tokens do not lie where 4 moves bring them"):
        compare()


def test_what_moves_take_beyond_a_call_is_set_against_one_copy_of_their_bytes() -> None:
    of_memcpy = timed(2, 4)
    parts = {"calls": (timed(3, 4), timed(5, 1)), "memcpy": (of_memcpy, of_memcpy)}
    row = _row(Samples(timed(9, 10), timed(4, 7), parts=parts), {"moves": 256})
    assert row.ratios == {"jax/memcpy": Spread.of([3, 1.5]), "torch/memcpy": Spread.of([0, 1.5])}


def test_a_copy_of_many_bytes_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from vtoken_bench.executors import sides

    copied: list[int] = []
    copy: Callable[..., Any] = torch.Tensor.copy_
    monkeypatch.setattr(sides, "_MOST_COPIED", 100)
    work = memcpy("cpu", 250)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda into, source: copied.append(len(source)) or copy(into, source))
    work()
    assert copied == [100, 100, 50]


def test_requests_hold_different_bytes() -> None:
    program = Program(make_spec("float32", 2, 8), 2, 8)
    size = program.spec.token_bytes
    assert len(program.kv(0)) == len(program.kv(1)) == 8 * size
    assert program.kv(0)[size:] == program.kv(1)[:-size] != program.kv(0)[:-size]


@pytest.mark.parametrize(
    ("given", "programs", "moves", "decodes"),
    [
        ((False, None, None, None, None), 5, 2, 3),
        ((True, None, None, None, None), 12, 2, 12),
        ((True, None, None, None, "decode"), 0, 0, 12),
        ((True, None, [512], None, "programs"), 6, 0, 0),
        ((False, [1, 8], None, None, None), 2, 2, 2),
        ((False, None, None, ["bf16"], None), 1, 1, 1),
    ],
)
def test_flags_choose_the_shapes(given: Any, programs: int, moves: int, decodes: int) -> None:
    chosen = choose(*given)
    assert (len(chosen.programs), len(chosen.moves), len(chosen.decodes)) == (programs, moves, decodes)


def test_the_whole_grid_has_every_shape_once_and_each_dtype_in_one_piece() -> None:
    decodes = choose(True, None, None, None, None).decodes
    assert len(set(decodes)) == 12
    assert Shape(32, 4096, "bf16") in decodes
    assert [shape.dtype for shape in decodes] == ["f32"] * 6 + ["bf16"] * 6


def test_transformers_is_left_out_before_a_shape_is_skipped() -> None:
    pool = 32 * 4096 * 46_080
    assert decode_shape(32, 4096, 46_080, None).with_hf
    assert decode_shape(32, 4096, 46_080, int(3.5 * pool) + 2_000_000_001).with_hf
    assert not decode_shape(32, 4096, 46_080, int(2.5 * pool) + 2_000_000_001).with_hf
    with pytest.raises(NoRoom, match=r"two pools need 17\.1 GB of memory, 10\.0 GB are available"):
        decode_shape(32, 4096, 46_080, 10_000_000_000)


def test_the_documents_show_the_kept_record_and_nothing_else() -> None:
    root = Path(__file__).parents[2]
    kept = root / "bench" / "results" / "executors.json"
    tables = markdown_tables(json.loads(kept.read_text())) + "\n" if kept.exists() else ""
    shown = (root / "docs" / "jax.md").read_text().split("<!-- executors -->\n")[1]
    assert shown.split("<!-- end of executors -->")[0] == tables
