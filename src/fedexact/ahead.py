"""Programs that are compiled on another core while this one compiles or runs others."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from fedexact.core import float64

_worker = ThreadPoolExecutor(1, thread_name_prefix="fedexact-compile")
_programs: dict[Any, Future[None]] = {}  # those begun, by what tells them apart


def compile_ahead(program: Any, static: tuple[Any, ...], args: tuple[Any, ...]) -> None:
    """Begins to compile the jitted `program` for these arguments, unless that was done before.

    Nothing is run; what fails is told by `program(*static, *args)` itself.
    """
    key = _key(program, static, args)
    if key not in _programs and jax.process_count() == 1:
        _programs[key] = _worker.submit(_compile, program, (*static, *args))


def wait_for(program: Any, static: tuple[Any, ...], args: tuple[Any, ...]) -> None:
    """Until `program` is compiled for these arguments, if that has begun."""
    if _programs:
        begun = _programs.get(_key(program, static, args))
        if begun is not None:
            begun.exception()


def _compile(program: Any, args: tuple[Any, ...]) -> None:
    with float64():
        program.lower(*args).compile()


def _key(program: Any, static: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    leaves, tree = jax.tree.flatten(args)
    kinds = tuple((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)
    return program, static, tree, kinds
