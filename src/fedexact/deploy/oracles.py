"""A site's own objective: any object with `value` and `grad` on NumPy vectors.

    class Mine:
        n_rows = 250                             # rows behind it, for weights="rows"
        dim = 11                                 # length of x
        smoothness, strong_convexity = 3.2, 0.1  # L and l, or bounds; strong_convexity 0 if unknown
        def value(self, x): ...                  # float, the mean over its rows
        def grad(self, x): ...                   # (dim,)
        # optional:
        def prox(self, v, step): ...             # argmin_u value(u) + |u - v|^2 / (2 step)
        def stochastic_grad(self, x, seed, batch_size): ...
        def hessian(self, x): ...                # (dim, dim)

A function that makes such an object is named in the node's config, oracle="module:function".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedexact.errors import CapabilityError, InputError
from fedexact.oracles.gradient import gradient_prox
from fedexact.oracles.proximal import Magnitude

NEEDED = ("n_rows", "dim", "smoothness", "value", "grad")


def load(name: str) -> Any:
    """The object that `module:function` makes. InputError."""
    module, _, function = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"oracle {name!r}: give it as module:function ({error})") from None
    for need in NEEDED:
        if not hasattr(made, need):
            raise InputError(f"oracle {name!r}: {type(made).__name__} has no {need}")
    return made


class ObjectOracle:
    """`scale` times the object's objective, as the algorithms call it: from compiled code."""

    def __init__(self, objective: Any, scale: float) -> None:
        self._objective, self._scale = objective, scale
        self.n_rows = jnp.asarray(objective.n_rows)
        self.smoothness = jnp.asarray(scale * objective.smoothness, float)
        self.strong_convexity = jnp.asarray(
            scale * getattr(objective, "strong_convexity", 0.0), float
        )

    def value(self, x: Array) -> Array:
        return self._scale * self._call(self._objective.value, (), x)

    def grad(self, x: Array) -> Array:
        return self._scale * self._call(self._objective.grad, x.shape, x)

    def value_and_grad(self, x: Array) -> tuple[Array, Array]:
        return self.value(x), self.grad(x)

    def stochastic_grad(self, x: Array, key: Array, batch_size: int) -> Array:
        draw = self._method("stochastic_grad")
        seed = jax.random.bits(key, (), jnp.uint32)
        return self._scale * self._call(
            lambda x, seed: draw(x, int(seed), batch_size), x.shape, x, seed
        )

    def hessian(self, x: Array) -> Array:
        return self._scale * self._call(self._method("hessian"), (x.size, x.size), x)

    def prox(self, v: Array, step: Any, start: Array) -> Array:
        return self.counted_prox(v, step, start)[0]

    def counted_prox(self, v: Array, step: Any, start: Array) -> tuple[Array, Array | int]:
        """The object's own prox, or gradient steps to a relative rule."""
        prox = getattr(self._objective, "prox", None)
        if prox is not None:  # prox of scale f with step = prox of f with scale step
            own = self._call(
                lambda v, step: prox(v, float(step)), v.shape, v, self._scale * jnp.asarray(step)
            )
            return own, 1
        return gradient_prox(self._magnitude, self.grad, self.smoothness, True, v, step, start)

    def _magnitude(self, x: Array) -> Magnitude:
        value = self.value(x)
        return Magnitude(value, jnp.abs(value))

    def _method(self, name: str) -> Callable[..., Any]:
        method = getattr(self._objective, name, None)
        if method is None:
            raise CapabilityError(
                f"the algorithm needs {name}, which {type(self._objective).__name__} does not have"
            )
        return method

    def _call(self, method: Callable[..., Any], shape: tuple[int, ...], *args: Array) -> Array:
        def checked(*args: Array) -> np.ndarray:
            found = np.asarray(method(*(np.asarray(a) for a in args)), float)
            if found.shape != shape:
                raise InputError(f"the oracle returned the shape {found.shape}, wanted {shape}")
            return found

        return jax.pure_callback(checked, jax.ShapeDtypeStruct(shape, jnp.float64), *args)
