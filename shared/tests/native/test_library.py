import logging
import stat

import pytest

from vtoken.native import library
from vtoken.native.library import compiler, load

ANSWER = 'extern "C" int answer() { return %s; }\n'
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and nothing that this process has loaded before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.load.cache_clear()
    yield tmp_path / "cache" / "vtoken" / "native"
    library.load.cache_clear()


@pytest.fixture
def source(tmp_path):
    return written(tmp_path, ANSWER % 42)


def written(folder, text):
    path = folder / "answer.cc"
    path.write_text(text)
    return path


def fake_compiler(monkeypatch, folder, script):
    path = folder / "fake-c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(path))


@needs_compiler
def test_what_was_compiled_is_kept_and_needs_no_compiler_again(cache, source, monkeypatch):
    assert load(source).answer() == 42
    (kept,) = cache.iterdir()  # nothing of the compilation is left beside it

    library.load.cache_clear()
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert load(source).answer() == 42
    assert list(cache.iterdir()) == [kept]


@needs_compiler
def test_another_source_or_header_is_compiled_anew(cache, source, tmp_path):
    assert load(source).answer() == 42
    library.load.cache_clear()
    assert load(written(tmp_path, ANSWER % 43)).answer() == 43

    library.load.cache_clear()
    (tmp_path / "headers").mkdir()
    source = written(tmp_path, '#include "number.h"\n' + ANSWER % "NUMBER")
    for number in (44, 45):
        (tmp_path / "headers" / "number.h").write_text(f"#define NUMBER {number}\n")
        library.load.cache_clear()
        assert load(source, tmp_path / "headers").answer() == number
    assert len(list(cache.iterdir())) == 4


@needs_compiler
def test_a_damaged_library_is_made_anew(cache, source):
    load(source)
    (kept,) = cache.iterdir()
    kept.unlink()
    kept.write_bytes(b"\x7fELF and no more")

    library.load.cache_clear()
    assert load(source).answer() == 42


@needs_compiler
def test_where_nothing_can_be_kept_it_is_compiled_and_loaded_all_the_same(cache, source):
    cache.parent.parent.write_bytes(b"a file where the folder would be")
    assert load(source).answer() == 42


def test_without_a_compiler_there_is_none_and_one_warning_says_what_to_install(cache, source, monkeypatch, caplog):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert compiler() is None

    with caplog.at_level(logging.WARNING, "vtoken"):
        assert load(source) is None
        assert load(source) is None
    (told,) = caplog.messages
    assert "answer.cc is not compiled, slower code does its work: no C++ compiler" in told
    assert "apt-get install g++" in told


def test_a_compiler_that_fails_is_quoted(cache, source, monkeypatch, tmp_path, caplog):
    fake_compiler(monkeypatch, tmp_path, "echo 'answer.cc:1: warning: so so' >&2; echo 'error: no C++17' >&2; exit 1")
    assert load(source) is None
    assert "fake-c++ failed: error: no C++17" in caplog.text
    assert list(cache.iterdir()) == []


def test_a_compiler_that_makes_nothing_that_loads_leaves_nothing(cache, source, monkeypatch, tmp_path, caplog):
    fake_compiler(monkeypatch, tmp_path, 'while [ "$1" != -o ]; do shift; done; echo rubbish >"$2"')
    assert load(source) is None
    assert "is not compiled" in caplog.text
    assert list(cache.iterdir()) == []


def test_the_compiler_named_by_cxx_is_the_one_with_its_words(monkeypatch, tmp_path):
    fake_compiler(monkeypatch, tmp_path, "exit 0")
    path = tmp_path / "fake-c++"
    monkeypatch.setenv("CXX", f"{path} -march=native")
    assert compiler() == [str(path), "-march=native"]
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert compiler() is None
