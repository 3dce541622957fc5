import re
import sys

import pytest

from vtoken.errors import SpecError
from vtoken.reference import ReferenceExecutor
from vtoken_conformance.selection import load_executors


def test_a_class_in_the_current_directory_is_found(user_module):
    name = user_module("""
        from vtoken.reference import ReferenceExecutor

        class Mine(ReferenceExecutor):
            pass
    """)
    executors, left_out = load_executors([f"{name}:Mine", "reference"])
    assert [make.__name__ for make in executors.values()] == ["Mine", "ReferenceExecutor"]
    assert isinstance(executors[f"{name}:Mine"](), ReferenceExecutor)
    assert left_out == {}


def test_the_search_path_is_left_alone_for_installed_executors(user_module):
    before = [*sys.path]
    load_executors(["reference"])
    assert sys.path == before


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise RuntimeError('boom')", "its import raises RuntimeError: boom: repair the module"),
        ("raise SystemExit(4)", "its import raises SystemExit: 4: repair the module"),
        ("def (", "its import raises SyntaxError: invalid syntax"),
        ("import no_such_thing", "No module named 'no_such_thing': give MODULE:CLASS; .* on PYTHONPATH"),
        ("from vtoken import nothing", "its import raises ImportError: cannot import name 'nothing'"),
        ("Executor = 5", "is no class: give MODULE:CLASS"),
        ("", "has no attribute 'Executor': give MODULE:CLASS"),
        ("from collections import OrderedDict as Executor", "lacks name, allocate, admit, .*: implement the protocol"),
        (
            "class Executor:\n    def __init__(self, device): ...",
            "cannot be made: TypeError: .* missing 1 required positional argument: 'device': it must be made without",
        ),
        (
            "class Executor:\n    def __init__(self): raise SystemExit(3)",
            "cannot be made: SystemExit: 3",
        ),
        (
            """
            from vtoken.reference import ReferenceExecutor

            class Executor(ReferenceExecutor):
                reap = property()
            """,
            "lacks reap: implement the protocol vtoken.executor.Executor",
        ),
    ],
)
def test_what_cannot_serve_is_refused_with_name_reason_and_remedy(user_module, source, message):
    name = user_module(source)
    with pytest.raises(SpecError, match=f"^executor '{name}:Executor'.*{message}") as caught:
        load_executors([f"{name}:Executor"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", [":Executor", "vtoken.reference:", ":"])
def test_half_a_path_is_refused(path):
    with pytest.raises(SpecError, match=f"executor '{path}': a part is missing: give MODULE:CLASS"):
        load_executors([path])


def test_a_module_that_is_not_found_names_the_places_to_look():
    message = "No module named 'no_such': give MODULE:CLASS; the module may lie in the current directory, .* PYTHONPATH"
    with pytest.raises(SpecError, match=message):
        load_executors(["no_such:Executor"])


def test_an_installed_executor_that_cannot_be_made_does_not_hide_the_others(monkeypatch):
    plugins = {"reference": ReferenceExecutor, "broken": lambda device: None, "half": dict}
    monkeypatch.setattr("vtoken_conformance.selection.load_plugins", lambda group: (plugins, {}))
    executors, left_out = load_executors(None)
    assert executors == {"reference": ReferenceExecutor}
    assert re.search("'broken' cannot be made: TypeError", str(left_out["broken"]))
    assert re.search("'half' lacks name, allocate", str(left_out["half"]))


def test_if_no_installed_executor_can_serve_each_reason_is_told(monkeypatch):
    monkeypatch.setattr("vtoken_conformance.selection.load_plugins", lambda group: ({"half": dict}, {}))
    with pytest.raises(SpecError, match=r"no executor loads .*'half' lacks name.*: name one that does with --executor"):
        load_executors(None)
