import pytest

from vtoken_bench.record import suite_record


@pytest.mark.parametrize("command", [["/usr/bin/g++"], None])
def test_a_record_tells_the_compiler_of_host_code_or_that_there_is_none(monkeypatch, command):
    monkeypatch.setattr("vtoken_bench.record.compiler", lambda: command)

    record = suite_record("suite/1", [], {})

    assert record["environment"]["compiler"] == command
    assert record["environment"]["python"]
