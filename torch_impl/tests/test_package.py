import importlib
import sys

import pytest

import vtoken_torch


def test_importing_without_torch_fails_with_one_line_that_names_the_extra(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    monkeypatch.delitem(sys.modules, "vtoken_torch")
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("vtoken_torch")
    assert str(caught.value) == "vtoken_torch needs torch: pip install 'vtoken[torch]'"
    assert vtoken_torch.__name__ == "vtoken_torch"
