"""Host state as plain JSON data and back: containers, numbers, and the few classes that are named, nothing else.

Unlike pickle it runs no code of the file's choice: a class that is not listed, or one with other fields, is refused.
"""

import base64
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from typing import Any

from vtoken.errors import SpecError

__all__ = ["decode", "encode"]

_LISTS: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "set": set}
_MAPPINGS: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "Counter": lambda pairs: Counter(dict(pairs)),
    "OrderedDict": OrderedDict,
    "defaultdict": lambda pairs: defaultdict(list, pairs),
}


def encode(value: Any, classes: Collection[type]) -> Any:
    """A JSON value; keys of mappings may be anything. Objects of ``classes`` become their attributes."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value).__name__
    if kind in _LISTS:
        return [kind, [encode(each, classes) for each in value]]
    if kind in _MAPPINGS:
        return [kind, [[encode(key, classes), encode(each, classes)] for key, each in value.items()]]
    if isinstance(value, deque):
        return [kind, [encode(each, classes) for each in value], value.maxlen]
    if isinstance(value, array):
        return [kind, value.typecode, base64.b64encode(value.tobytes()).decode()]
    if isinstance(value, bytes | bytearray):
        return [kind, base64.b64encode(value).decode()]
    if type(value) not in classes:
        raise TypeError(f"{type(value).__qualname__} is not listed as plain data")
    return [f"{kind}()", {name: encode(each, classes) for name, each in _attributes(value).items()}]


def decode(data: Any, classes: Collection[type]) -> Any:
    """What ``encode`` was given. Raises SpecError for data that it cannot have made."""
    if not isinstance(data, list):
        return data
    try:
        kind, *parts = data
        if kind in _LISTS:
            return _LISTS[kind]([decode(each, classes) for each in parts[0]])
        if kind in _MAPPINGS:
            return _MAPPINGS[kind]([(decode(key, classes), decode(each, classes)) for key, each in parts[0]])
        if kind == "deque":
            return deque([decode(each, classes) for each in parts[0]], parts[1])
        if kind == "array":
            return array(parts[0], base64.b64decode(parts[1]))
        if kind in ("bytes", "bytearray"):
            return {"bytes": bytes, "bytearray": bytearray}[kind](base64.b64decode(parts[0]))
        return _rebuilt({f"{each.__name__}()": each for each in classes}[kind], parts[0], classes)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"host state does not read: {error!r}: it was written by another version") from None


def _attributes(value: Any) -> dict[str, Any]:
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(vars(value))


def _rebuilt(kind: type, attributes: dict[str, Any], classes: Collection[type]) -> Any:
    if is_dataclass(kind) and {field.name for field in fields(kind)} != attributes.keys():
        raise SpecError(f"host state has another {kind.__name__}: it was written by another version")
    value: Any = object.__new__(kind)
    for name, each in attributes.items():
        object.__setattr__(value, name, decode(each, classes))
    return value
