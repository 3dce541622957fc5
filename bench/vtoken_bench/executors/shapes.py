"""Which shapes are compared."""

from collections.abc import Sequence
from itertools import product
from typing import Final, NamedTuple

from vtoken.executor import DType

__all__ = ["DTYPES", "Chosen", "Shape", "choose"]

DTYPES: Final[dict[str, DType]] = {"f32": "float32", "bf16": "bfloat16"}
_BATCHES: Final = (1, 8, 32)
_LIVE: Final = (512, 4096)


class Shape(NamedTuple):
    """``batch`` requests of ``live`` tokens in a dtype of ``DTYPES``."""

    batch: int
    live: int
    dtype: str

    def __str__(self) -> str:
        return f"batch {self.batch}, live {self.live}, {self.dtype}"


class Chosen(NamedTuple):
    """Programs, dtypes of moves, decodes: in an order in which little is loaded twice."""

    programs: Sequence[Shape]
    moves: Sequence[str]
    decodes: Sequence[Shape]

    def __len__(self) -> int:
        return len(self.programs) + len(self.moves) + len(self.decodes)


_DEFAULT_PROGRAMS: Final = tuple(
    Shape(*each) for each in ((1, 512, "f32"), (8, 512, "f32"), (32, 512, "f32"), (8, 4096, "f32"), (8, 512, "bf16"))
)
_DEFAULT_DECODES: Final = tuple(Shape(*each) for each in ((1, 512, "f32"), (8, 512, "f32"), (8, 512, "bf16")))


def choose(
    full: bool,
    batch: Sequence[int] | None,
    live: Sequence[int] | None,
    dtype: Sequence[str] | None,
    only: str | None,
) -> Chosen:
    """A few shapes; the whole grid if ``full``; the product of what is given, its first value for what is not."""
    if full or batch or live or dtype:
        end = None if full else 1
        grid = product(dtype or tuple(DTYPES)[:end], live or _LIVE[:end], batch or _BATCHES[:end])
        programs = decodes = [Shape(count, tokens, name) for name, tokens, count in grid]
    else:
        programs, decodes = list(_DEFAULT_PROGRAMS), list(_DEFAULT_DECODES)
    return Chosen(
        programs if only in (None, "programs") else [],
        list(dtype or DTYPES) if only in (None, "moves") else [],
        decodes if only in (None, "decode") else [],
    )
