from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from vtoken import plugins
from vtoken.errors import SpecError
from vtoken.plugins import (
    COMMANDS,
    EXECUTORS,
    POLICIES,
    get_plugin,
    load_plugins,
    missing_extra,
    plugin_names,
    require_extra,
)

Register = Callable[..., None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Register:
    """Replaces the installed entry points by ``(group, name, module source)`` triples."""
    points: list[metadata.EntryPoint] = []
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins.metadata, "entry_points", lambda **by: metadata.EntryPoints(points).select(**by))

    def add(group: str, name: str, source: str) -> None:
        module = f"plugin_{tmp_path.name}_{len(points)}"
        (tmp_path / f"{module}.py").write_text(source)
        points.append(metadata.EntryPoint(name, f"{module}:thing", group))

    return add


def test_a_plugin_that_fails_to_import_is_reported_by_name_and_the_others_load(register: Register) -> None:
    register(POLICIES, "good", "thing = 'good thing'")
    register(POLICIES, "broken", "raise RuntimeError('no luck today\\nsecond line')")
    register(POLICIES, "absent", "other = 1")
    register(POLICIES, "typo", "def thing(:")

    loaded, failed = load_plugins(POLICIES)

    assert loaded == {"good": "good thing"}
    assert sorted(failed) == ["absent", "broken", "typo"]
    assert str(failed["broken"]) == "RuntimeError: no luck today"
    assert "AttributeError" in str(failed["absent"])
    assert "SyntaxError" in str(failed["typo"])


def test_a_plugin_that_exits_at_import_does_not_end_the_program(register: Register) -> None:
    register(POLICIES, "quitter", "import sys; sys.exit('bye')")
    register(POLICIES, "good", "thing = 1")

    loaded, failed = load_plugins(POLICIES)

    assert loaded == {"good": 1}
    assert str(failed["quitter"]) == "SystemExit: bye"


def test_ctrl_c_during_an_import_is_not_swallowed(register: Register) -> None:
    register(POLICIES, "slow", "raise KeyboardInterrupt")

    with pytest.raises(KeyboardInterrupt):
        load_plugins(POLICIES)


def test_an_unknown_name_suggests_the_closest(register: Register) -> None:
    register(POLICIES, "streaming_llm", "thing = 1")
    register(POLICIES, "h2o", "thing = 1")

    with pytest.raises(SpecError, match=r"^unknown policy 'streamingllm': did you mean 'streaming_llm'\?$"):
        get_plugin(POLICIES, "streamingllm")


def test_an_unknown_name_with_nothing_close_lists_the_known_ones(register: Register) -> None:
    register(EXECUTORS, "torch", "thing = 1")
    register(EXECUTORS, "jax", "thing = 1")

    with pytest.raises(SpecError, match=r"^unknown executor 'xyz': known: jax, torch$"):
        get_plugin(EXECUTORS, "xyz")


def test_getting_one_plugin_imports_no_other(register: Register) -> None:
    register(EXECUTORS, "good", "thing = 7")
    register(EXECUTORS, "deadly", "raise KeyboardInterrupt")

    assert get_plugin(EXECUTORS, "good") == 7


def test_getting_a_broken_plugin_names_it_and_the_reason(register: Register) -> None:
    register(EXECUTORS, "broken", "raise ValueError('bad weather')")

    with pytest.raises(SpecError, match=r"^executor 'broken' does not load: ValueError: bad weather$"):
        get_plugin(EXECUTORS, "broken")


def test_a_missing_package_names_the_extra_to_install(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins.metadata, "requires", lambda _: ["not_there>=1; extra == 'special'"])
    register(EXECUTORS, "needy", "import not_there.deep")

    _, failed = load_plugins(EXECUTORS)

    assert str(failed["needy"]) == "No module named 'not_there': pip install 'vtoken[special]'"


def test_a_name_that_two_distributions_register_is_refused_and_both_are_named(register: Register) -> None:
    register(POLICIES, "h2o", "thing = 1")
    register(POLICIES, "h2o", "thing = 2")

    with pytest.raises(
        SpecError, match=r"'h2o' .*registered more than once, as plugin_\S+_0:thing and plugin_\S+_1:thing"
    ):
        get_plugin(POLICIES, "h2o")


@pytest.mark.parametrize(
    ("module", "extra"), [("torch", "torch"), ("jax", "jax"), ("ml_dtypes", "jax"), ("rich", "conformance")]
)
def test_the_installed_distribution_knows_which_extra_brings_a_package(module: str, extra: str) -> None:
    assert missing_extra(ModuleNotFoundError(name=module)) == f"pip install 'vtoken[{extra}]'"


def test_no_extra_is_invented_for_a_package_that_none_brings() -> None:
    assert missing_extra(ModuleNotFoundError(name="vtoken_bench.nowhere")) is None
    assert missing_extra(ModuleNotFoundError()) is None


def test_a_package_without_its_extra_refuses_in_one_line() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^vtoken_moon needs no_such_thing: pip install 'vtoken\[moon\]'$"):
        require_extra("vtoken_moon", "moon", "sys", "no_such_thing")


def test_the_shipped_policies_and_executors_are_registered() -> None:
    assert {"none", "random", "streaming_llm", "sliding_window", "h2o", "scissorhands", "tova", "snapkv"} <= set(
        plugin_names(POLICIES)
    )
    assert {"reference", "torch", "jax"} <= set(plugin_names(EXECUTORS))


@pytest.mark.parametrize("group", [COMMANDS, EXECUTORS, POLICIES])
def test_every_registered_plugin_loads_unless_its_extra_is_not_installed(group: str) -> None:
    loaded, failed = load_plugins(group)
    causes = {name: error.__cause__ for name, error in failed.items()}
    broken = {
        name: str(failed[name])
        for name, cause in causes.items()
        if not (isinstance(cause, ModuleNotFoundError) and missing_extra(cause))
    }

    assert broken == {}
    assert loaded
