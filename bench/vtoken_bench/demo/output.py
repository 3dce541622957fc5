"""A folder of results that appears whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from vtoken.errors import SpecError
from vtoken_bench.models import check_disk

__all__ = ["staged"]

_NEEDED_BYTES = 20_000_000


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A folder to write into, on the file system of ``out``. Its files move into ``out`` if the block ends well.

    Otherwise, an interrupt among the reasons, ``out`` stays as it was and nothing is left.

    Raises:
        SpecError: ``out`` is a file or lies beneath one, takes no files, or there is no room for it. Raised before
            any work is done.
        OSError: a file of the block cannot be written; it names that file below ``out``.
    """
    nearest = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise SpecError(f"--out {out}: {nearest} is a file: name a folder")
    check_disk(nearest, _NEEDED_BYTES, "the report", "give another --out")
    try:
        folder = TemporaryDirectory(prefix=".vtoken-demo-", dir=nearest)
    except OSError as error:
        raise SpecError(f"--out {out}: {nearest} takes no files ({error.strerror}): give another --out") from None
    with folder as staging:
        try:
            yield Path(staging)
        except OSError as error:
            if error.filename and Path(error.filename).parent == Path(staging):
                raise OSError(error.errno, error.strerror, str(out / Path(error.filename).name)) from error
            raise
        out.mkdir(parents=True, exist_ok=True)
        for file in sorted(Path(staging).iterdir()):
            file.replace(out / file.name)
