"""What is added up over the clients of a round: validated, then summed in client order.

Uploads are added one after the other in float64, whatever the order in which they came, so that a
round's sum has the bits of the loop engine's. A secure sum comes out of the masks already added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedexact.deploy.messages import Content, RefusedError
from fedexact.deploy.secure import LIMBS, Announcement, unmasked_sum

MALFORMED = "malformed"
NOT_FINITE = "not finite"

Arrays = dict[str, np.ndarray]
Shapes = Mapping[str, Any]  # name -> something with shape and dtype


def check(content: Content, expected: Shapes) -> None:
    """Raises RefusedError unless the arrays are as expected, and finite."""
    if content.arrays.keys() != expected.keys():
        raise RefusedError(
            MALFORMED, f"sends {_listed(content.arrays)}, expected {_listed(expected)}"
        )
    for name, like in expected.items():
        array = content.arrays[name]
        if array.shape != like.shape or array.dtype != like.dtype:
            raise RefusedError(
                MALFORMED,
                f"{name} is {array.dtype} {array.shape}, expected {like.dtype} {like.shape}",
            )
        if array.dtype.kind == "f" and not np.all(np.isfinite(array)):
            raise RefusedError(NOT_FINITE, f"{name} has a value that is not finite")


def check_masked(content: Content, expected: Shapes) -> None:
    """Raises RefusedError unless the masked vector is as long as the arrays in it."""
    length = sum(int(np.prod(like.shape)) for like in expected.values())
    limbs = content.arrays.get("masked")
    if limbs is None or len(content.arrays) != 1:
        raise RefusedError(MALFORMED, f"sends {_listed(content.arrays)}, expected masked")
    if limbs.shape != (length, LIMBS) or limbs.dtype != np.uint64:
        raise RefusedError(
            MALFORMED,
            f"the masked vector is {limbs.dtype} {limbs.shape}, expected uint64 {(length, LIMBS)}",
        )


def plain(contents: Sequence[Content]) -> Arrays:
    """The sums of the arrays of several clients, in this order."""
    first, *others = ({n: jnp.asarray(a) for n, a in c.arrays.items()} for c in contents)
    total = jax.tree.map(lambda *a: sum(a[1:], start=a[0]), first, *others)
    return {name: np.asarray(array) for name, array in total.items()}


def secure(contents: Mapping[str, Content], announced: Announcement, expected: Shapes) -> Arrays:
    """The same sums out of masked vectors, those of all who were announced."""
    vector = unmasked_sum({name: c.arrays["masked"] for name, c in contents.items()}, announced)
    total, at = {}, 0
    for name, like in expected.items():
        size = int(np.prod(like.shape))
        total[name] = vector[at : at + size].reshape(like.shape).astype(like.dtype)
        at += size
    return total


def _listed(arrays: Mapping[str, Any]) -> str:
    return ", ".join(sorted(arrays)[:8]) or "nothing"
