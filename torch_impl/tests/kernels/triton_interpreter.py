"""Runs a Triton kernel in Triton's interpreter on the CPU, while ``triton.jit`` goes on compiling for everybody else.

``interpreted(kernel)[grid](*args, **kwargs)`` is ``kernel[grid](*args, **kwargs)``.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import triton.experimental.gluon  # noqa: F401  (a launch imports it, and it must see Triton's library as it is)
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


def interpreted(kernel: JITFunction) -> "Interpreted":
    """A jitted kernel, to be launched in the interpreter. Jitted functions that it calls are interpreted too."""
    return Interpreted(InterpretedFunction(_python(kernel)))


class Interpreted:
    """Stands in for a kernel: the same grid, arguments and launch options."""

    def __init__(self, function: InterpretedFunction) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            with _interpreted_library():
                self._function[grid](*args, **kwargs)

        return launch


class _Called(InterpretedFunction):
    """What an interpreted kernel calls. The language is patched already, by the launch, which takes it back."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)


def _python(kernel: JITFunction) -> Callable[..., Any]:
    """A copy of a kernel's Python function with globals of its own: the interpreter adds names to them.

    ``core`` is there so that a launch patches what Triton's library is written in, too.
    """
    function = kernel.fn
    called = {
        name: _Called(_python(value))
        for name in function.__code__.co_names
        if isinstance(value := function.__globals__.get(name), JITFunction)
    }
    names = {**function.__globals__, "core": tl.core, **called}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__annotations__ = function.__annotations__
    copy.__module__ = function.__module__
    return copy


_LIBRARY = {
    (module, name): (value, _Called(value.fn))
    for module in (tl, tl.standard)
    for name, value in vars(module).items()
    if isinstance(value, JITFunction)
}


@contextmanager
def _interpreted_library() -> Iterator[None]:
    """Triton's own jitted functions (``tl.sum``, ``tl.cdiv``), which an interpreted kernel calls, for one launch."""
    for (module, name), (_, replacement) in _LIBRARY.items():
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for (module, name), (value, _) in _LIBRARY.items():
            setattr(module, name, value)
