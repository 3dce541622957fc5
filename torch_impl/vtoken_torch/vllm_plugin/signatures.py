"""Whether the vLLM at hand still has all that the plugin touches: classes, methods with their parameters, attributes.

vLLM is imported inside the functions alone.
"""

import dis
import importlib
import inspect
from collections.abc import Iterator, Sequence

from vtoken_torch.vllm_plugin.touched import ATTRIBUTES, METHODS

__all__ = ["changes"]


def changes() -> list[str]:
    """What this vLLM lacks of what ``touched.py`` lists."""
    methods = (text for where, wanted in METHODS.items() for text in _changed_methods(where, wanted))
    attributes = (text for where, wanted in ATTRIBUTES.items() for text in _lost_attributes(where, wanted))
    return [*methods, *attributes]


def _changed_methods(where: str, methods: Sequence[tuple[str, tuple[str, ...]]]) -> Iterator[str]:
    owner = _class(where)
    if owner is None:
        yield f"{where} is gone"
        return
    for method, parameters in methods:
        found = getattr(owner, method, None)
        if found is None:
            yield f"{owner.__name__}.{method} is gone"
            continue
        missing = [each for each in parameters if each not in inspect.signature(found).parameters]
        if missing:
            yield f"{owner.__name__}.{method} lost {', '.join(missing)}"


def _lost_attributes(where: str, attributes: Sequence[str]) -> Iterator[str]:
    owner = _class(where)
    if owner is None:
        yield f"{where} is gone"
        return
    known = _attributes_of(owner)
    for attribute in attributes:
        if attribute not in known and not hasattr(owner, attribute):
            yield f"{owner.__name__}.{attribute} is gone"


def _class(where: str) -> type | None:
    module, name = where.split(":")
    return getattr(importlib.import_module(module), name, None)


def _attributes_of(owner: type) -> set[str]:
    """What an instance has beside what its class shows: annotated, or assigned where it is made."""
    known: set[str] = set()
    for each in owner.__mro__:
        known.update(inspect.get_annotations(each))
        init = vars(each).get("__init__")
        if inspect.isfunction(init):
            steps = dis.get_instructions(inspect.unwrap(init))
            known.update(step.argval for step in steps if step.opname == "STORE_ATTR")
    return known
