"""Files that are either complete or absent: written beside their place, flushed, then renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_MARK = ".part-"


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path in the folder of `path`, renamed to `path` when the block succeeds.

    The temporary name keeps the suffix (writers that look at it choose the right format). When the
    block ends well the file is flushed to the disk and replaces `path` in one step; otherwise it is
    removed and `path` stays as it was. The folder is made if it does not exist.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}{_MARK}{secrets.token_hex(4)}{path.suffix}")
    try:
        yield part
        _flush(part)
        os.replace(part, path)
        _flush_folder(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_atomic(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes text (UTF-8) or bytes to `path`, completely or not at all."""
    with atomic_path(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def write_together(folder: Path, writers: Mapping[str, Callable[[Path], object]]) -> None:
    """Writes several files of a folder: all are complete before the first takes its place.

    `writers` maps a file name to a function that writes the path it is given.
    """
    with ExitStack() as stack:
        for name, write in writers.items():
            write(stack.enter_context(atomic_path(folder / name)))


def remove_parts(folder: str | os.PathLike[str]) -> None:
    """Removes what a killed process left half written in `folder`."""
    for part in Path(folder).glob(f".*{_MARK}*"):
        part.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    with suppress(OSError):  # Windows cannot open a folder; the rename itself is atomic there too
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
