from typing import Any

import pytest
from rich.console import Console

from vtoken_bench.demo.show import results_table


def row(policy: str | None, variant: str) -> dict[str, Any]:
    figures = {
        "held_blocks_end": 142,
        "held_blocks_peak": 143,
        "ideal_blocks_end": 141,
        "num_moved_tokens": 1128,
        "num_recycled_tokens": 12345,
        "utilization_end": 0.99,
    }
    marks = {"reference": {"same_bytes": True}, "jax": {"same_bytes": False}}
    return {"policy": policy, "variant": variant, "executors": marks, **figures}


def shown(width: int) -> list[str]:
    record = {"rows": [row(None, "native"), row("streaming_llm", "naive"), row("streaming_llm", "eager")]}
    console = Console(width=width)
    with console.capture() as capture:
        console.print(results_table(record, ["reference", "torch", "jax"], width))
    return capture.get().splitlines()


@pytest.mark.parametrize(
    ("width", "figures"),
    [(60, ["142", "1,128"]), (80, ["142", "141", "1,128", "12,345"])],
)
def test_every_row_stands_whole_on_its_line(width: int, figures: list[str]) -> None:
    lines = [line.split() for line in shown(width)]

    for names in (["-", "native"], ["streaming_llm", "naive"], ["streaming_llm", "eager"]):
        assert [*names, *figures, "same", "-", "differs"] in lines


def test_a_wide_terminal_shows_every_figure_without_a_break() -> None:
    assert sum("12,345" in line and line.rstrip().endswith("differs") for line in shown(110)) == 3
