import pytest

from vtoken_conformance.progress import progress_bar


def test_a_terminal_sees_the_bar_and_a_pipe_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    with progress_bar("works") as progress:
        progress.add_task("works")
    assert tuple(capsys.readouterr()) == ("", "")

    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("works") as progress:
        progress.add_task("works")
        progress.refresh()
    assert "works" in capsys.readouterr().err
