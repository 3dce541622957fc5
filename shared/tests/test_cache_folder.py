import pwd
from pathlib import Path

import pytest

from vtoken.cache_folder import cache_folder
from vtoken.errors import SpecError


@pytest.mark.parametrize("unset", ["", None])
def test_the_cache_lies_where_the_desktop_standard_says(monkeypatch, tmp_path, unset):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "vtoken"

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME") if unset is None else monkeypatch.setenv("XDG_CACHE_HOME", unset)
    assert cache_folder() == Path.home() / ".cache" / "vtoken" == tmp_path / ".cache" / "vtoken"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def nobody(user_id):
        raise KeyError(user_id)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(SpecError, match="set XDG_CACHE_HOME"):
        cache_folder()
