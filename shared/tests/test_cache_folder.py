from pathlib import Path

import pytest

from vtoken.cache_folder import cache_folder


@pytest.mark.parametrize("unset", ["", None])
def test_the_cache_lies_where_the_desktop_standard_says(monkeypatch, tmp_path, unset):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "vtoken"

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME") if unset is None else monkeypatch.setenv("XDG_CACHE_HOME", unset)
    assert cache_folder() == Path.home() / ".cache" / "vtoken" == tmp_path / ".cache" / "vtoken"
