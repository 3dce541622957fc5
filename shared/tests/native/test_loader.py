import logging
import re
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from vtoken.errors import SpecError
from vtoken.native import loader
from vtoken.native.loader import compiler, load

ANSWER = 'extern "C" int answer() { return %s; }\n'
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and nothing that this process has loaded before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loader._load.cache_clear()
    yield tmp_path / "cache" / "vtoken" / "native"
    loader._load.cache_clear()


@pytest.fixture
def source(tmp_path):
    return written(tmp_path, ANSWER % 42)


def written(folder, text):
    path = folder / "answer.cc"
    path.write_text(text)
    return path


def fake_compiler(monkeypatch, folder, script):
    folder.mkdir(exist_ok=True)
    path = folder / "fake-c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(path))


@needs_compiler
def test_what_was_compiled_is_kept_and_needs_no_compiler_again(cache, source, monkeypatch):
    assert load(source).answer() == 42
    (kept,) = cache.iterdir()  # nothing of the compilation is left beside it

    loader._load.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert load(source).answer() == 42
    assert list(cache.iterdir()) == [kept]


@needs_compiler
def test_another_source_or_header_is_compiled_anew(cache, source, tmp_path):
    assert load(source).answer() == 42
    loader._load.cache_clear()
    assert load(written(tmp_path, ANSWER % 43)).answer() == 43

    loader._load.cache_clear()
    (tmp_path / "headers").mkdir()
    source = written(tmp_path, '#include "number.h"\n' + ANSWER % "NUMBER")
    for number in (44, 45):
        (tmp_path / "headers" / "number.h").write_text(f"#define NUMBER {number}\n")
        loader._load.cache_clear()
        assert load(source, tmp_path / "headers").answer() == number
    assert len(list(cache.iterdir())) == 4


@needs_compiler
def test_another_word_to_the_compiler_is_another_library(cache, monkeypatch, tmp_path):
    command = shutil.which(compiler()[0])
    source = written(tmp_path, ANSWER % "NUMBER")
    for number in (44, 45):
        monkeypatch.setenv("CXX", f"'{command}' -DNUMBER={number}")
        loader._load.cache_clear()
        assert load(source).answer() == number


@needs_compiler
@pytest.mark.parametrize("length", [0, 20, 5000, -1])
def test_a_damaged_library_is_made_anew(cache, source, length):
    """The middle length would end the process: pages of a mapped file that the file does not reach are a bus error."""
    load(source)
    (kept,) = cache.iterdir()
    data = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(data[:length])

    loader._load.cache_clear()
    assert load(source).answer() == 42
    assert kept.read_bytes() == data


@needs_compiler
@pytest.mark.parametrize(
    "name", ["cache", "cache/vtoken/native", "x" * 300], ids=["a_file", "a_file_inside", "no_name"]
)
def test_where_nothing_can_be_kept_it_is_compiled_and_loaded_all_the_same(cache, source, monkeypatch, name):
    root = cache.parent.parent.parent
    if len(name) < 100:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"a file where the folder would be")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", str(root / name))
    assert load(source).answer() == 42


@needs_compiler
def test_a_user_without_a_home_compiles_too(cache, source, monkeypatch):
    def nowhere():
        raise SpecError("this user has no home")

    monkeypatch.setattr(loader, "cache_folder", nowhere)
    assert load(source).answer() == 42


@needs_compiler
def test_a_folder_may_have_any_name(cache, monkeypatch, tmp_path):
    folder = tmp_path / "ein Ördner [*] 'so'"
    folder.mkdir()
    (folder / "number.h").write_text("#define NUMBER 46\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    source = written(folder, '#include "number.h"\n' + ANSWER % "NUMBER")
    for _ in range(2):
        loader._load.cache_clear()
        assert load(source, folder).answer() == 46
    (kept,) = (folder / "vtoken" / "native").iterdir()
    assert kept.suffix == ".so"


@needs_compiler
def test_threads_that_ask_at_once_get_one_library_compiled_once(cache, source, monkeypatch, tmp_path):
    """Two would be two addresses of one function, and XLA takes no second one under the same name."""
    command = compiler()[0]
    fake_compiler(monkeypatch, tmp_path, f"echo compiled >>'{tmp_path}/calls'; exec '{command}' \"$@\"")
    cache.parent.parent.write_bytes(b"nothing can be kept")
    with ThreadPoolExecutor(6) as pool:
        libraries = list(pool.map(load, [source] * 6))
    assert len(set(map(id, libraries))) == 1
    assert libraries[0].answer() == 42
    assert (tmp_path / "calls").read_text() == "compiled\n"


def test_a_source_that_is_missing_is_told_like_a_compiler_that_is(cache, tmp_path, caplog):
    assert load(tmp_path / "gone.cc") is None
    assert "gone.cc is not compiled, slower code does its work" in caplog.text
    assert "No such file" in caplog.text


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


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (r"printf 'erreur: \351chec\n' >&2; exit 1", "fake-c++ failed: erreur: \N{REPLACEMENT CHARACTER}chec"),
        ("echo 'ld: link failed: No space' >&2; echo 'collect2: error: ld' >&2; exit 1", "ld: link failed: No space"),
        ("exit 3", "fake-c++ failed: exit 3"),
        ("kill -9 $$", "fake-c++ failed: exit -9"),
    ],
    ids=["other_letters", "full_disk", "silent", "killed"],
)
def test_whatever_a_failing_compiler_says_is_told(cache, source, monkeypatch, tmp_path, caplog, script, told):
    fake_compiler(monkeypatch, tmp_path, script)
    assert load(source) is None
    assert f"{told}: mend that, or name another compiler" in caplog.text


def test_a_compiler_that_hangs_is_given_up(cache, source, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(loader, "_TIMEOUT_S", 0.2)
    fake_compiler(monkeypatch, tmp_path, "exec sleep 600")
    assert load(source) is None
    assert "fake-c++ did not end within 0.2 s" in caplog.text
    assert list(cache.iterdir()) == []


def test_a_compiler_is_asked_nothing_at_the_terminal(cache, source, monkeypatch, tmp_path, caplog):
    fake_compiler(monkeypatch, tmp_path, "read answer || echo 'error: end of input' >&2; exit 1")
    assert load(source) is None
    assert "error: end of input" in caplog.text


def test_a_compiler_that_makes_nothing_that_loads_leaves_nothing(cache, source, monkeypatch, tmp_path, caplog):
    fake_compiler(monkeypatch, tmp_path, 'while [ "$1" != -o ]; do shift; done; echo rubbish >"$2"')
    assert load(source) is None
    assert re.search("what .*fake-c.. made does not load: .*: mend that, or name another compiler", caplog.text)
    assert list(cache.iterdir()) == []


def test_the_compiler_named_by_cxx_is_the_one_with_its_words(monkeypatch, tmp_path):
    fake_compiler(monkeypatch, tmp_path / "my tools", "exit 0")
    path = str(tmp_path / "my tools" / "fake-c++")
    for named, words in [(path, [path]), (f"'{path}' -march=native", [path, "-march=native"])]:
        monkeypatch.setenv("CXX", named)
        assert compiler() == words


@pytest.mark.parametrize("named", ["/no/such/compiler", "/no/such/compiler -O3", 'g++ "', "''"])
def test_a_cxx_that_names_no_command_is_told_and_no_other_taken(cache, source, monkeypatch, caplog, named):
    monkeypatch.setenv("CXX", named)
    assert compiler() is None
    assert load(source) is None
    assert f"CXX={named} is no command" in caplog.text


def test_a_cxx_that_is_no_utf8_is_told_too(cache, source, monkeypatch):
    told = []  # not by the log: a test's report cannot carry such a name from one process to another
    monkeypatch.setattr(loader._log, "warning", lambda message, *parts: told.append(message % parts))
    monkeypatch.setenv("CXX", "/\udce9/c++")
    assert load(source) is None
    assert ["CXX=/\udce9/c++ is no command" in line for line in told] == [True]


@pytest.mark.parametrize("named", ["", "  "])
def test_an_empty_cxx_names_nothing(monkeypatch, named):
    monkeypatch.delenv("CXX", raising=False)
    found = compiler()
    monkeypatch.setenv("CXX", named)
    assert compiler() == found
