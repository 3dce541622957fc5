"""Verification over HTTP: what a client gets whose request a broken engine has hit, and who comes after. The one server
with one API server: its metrics, and how it ends when its engine is killed, are checked here too."""

import os
import shutil

import pytest

_BROKEN = """
from pathlib import Path

def register():
    from vtoken_torch.vllm_plugin.layout import TokenMover
    move = TokenMover.move

    def lose_one(self, src, dst):
        (move(self, src[1:], dst[1:]) if Path(__file__).with_name("broken").exists() else move(self, src, dst))

    TokenMover.move = lose_one
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A plugin of vLLM's, next to vToken's: copies lose a token while a file of this name lies there."""
    folder = tmp_path / "plugin"
    info = folder / "losing_mover-1.dist-info"
    info.mkdir(parents=True)
    (folder / "losing_mover.py").write_text(_BROKEN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: losing-mover\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nlosing_mover = losing_mover:register\n")
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    return folder / "broken"


@pytest.mark.slow
def test_a_request_that_lost_a_token_is_a_500_and_the_server_goes_on(tiny_llama, tokens, tmp_path, plugin):
    from vllm_metrics import SERVE, check_metrics, files_of_ours, kill_the_engine, temporary_folder
    from vllm_server import Server, add_tokenizer

    model = tmp_path / "tiny"
    shutil.copytree(tiny_llama, model)
    add_tokenizer(model)
    with temporary_folder() as temporary:
        server = Server(tmp_path / "log", str(model), *SERVE, "--verify")
        try:
            check_metrics(server)
            check_break(server, tokens(150), plugin)
            kill_the_engine(server)
        finally:
            server.kill()
        assert files_of_ours(temporary) == []


def check_break(server, prompt, plugin):
    import openai

    api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(**xargs):
        body = {"vllm_xargs": xargs, "return_token_ids": True, "ignore_eos": True}
        settings = {"max_tokens": 20, "temperature": 0, "extra_body": body}
        return api.completions.create(model="tiny", prompt=prompt, **settings).choices[0].token_ids

    sound = ask()
    plugin.touch()
    with pytest.raises(openai.InternalServerError) as caught:
        ask()
    assert caught.value.status_code == 500
    assert len(ask(vtoken_off=1)) == 20  # it moves nothing
    plugin.unlink()
    assert ask() == sound
    assert "INV-1" in server.log()
