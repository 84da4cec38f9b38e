"""Splitting methods as compositions of resolvents on the stacked space (Ryu & Yin 2022).

A point of the stacked space is z = (z_1, ..., z_N), an (N, d) array. F + g is minimised where

    0 in A z + B z,   A z = (grad f_1(z_1), ..., grad f_N(z_N)),   B z = N_C(z) + N dg,

N_C the normal cone of the consensus subspace C = {z_1 = ... = z_N}, both operators of the *sum*
sum_k f_k(z_k) + N g: F's own factor 1/N is taken out on both sides. A resolvent is a function
J(z, s) = (I + s T)^-1 z; from two of them

    reflected(J)(z, s)  = 2 J(z, s) - z                              the Cayley operator
    averaged(T, tau)    = (1 - tau) I + tau T
    splitting(J1, J2, s, tau) = averaged(reflected(J1) reflected(J2), tau)

tau = 1 is Peaceman-Rachford, tau = 1/2 Douglas-Rachford. FedSplit is
splitting(proxes, consensus), FedDR splitting(consensus, proxes) with relax = 2 tau.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedexact.core import Prox, in_float64
from fedexact.errors import CapabilityError, InputError, check_positive
from fedexact.oracles import RowOracle
from fedexact.problem import Problem

Map: TypeAlias = Callable[[np.ndarray], np.ndarray]  # (N, d) -> (N, d)
Resolvent: TypeAlias = Callable[[np.ndarray, float], np.ndarray]  # (z, s) -> J_{sT} z, (N, d)


# --- composition ----------------------------------------------------------------------------------


def reflected(J: Resolvent) -> Resolvent:
    """The Cayley operator 2 J - I: nonexpansive, since J is firmly so.

    Its factor is `cayley_factor` if J is the resolvent of the gradient of a function that is
    strongly convex and smooth.
    """
    return lambda z, s: 2.0 * J(z, s) - z


def averaged(T: Map, tau: float) -> Map:
    """(1 - tau) I + tau T: the fixed points of T; for T nonexpansive and tau in (0, 1) the
    iteration converges to one of them, if there is any."""
    if not 0.0 < tau <= 1.0:
        raise InputError(f"tau must be within (0, 1], got {tau!r}")
    return lambda z: (1.0 - tau) * z + tau * T(z)


def splitting(first: Resolvent, second: Resolvent, step: float, tau: float) -> Map:
    """z -> (1 - tau) z + tau R_first(R_second z), R the reflected resolvents with `step`.

    For maximal monotone operators A and B with these resolvents, J_second z* solves 0 in A + B at
    every fixed point z*.
    """
    check_positive("step", step)
    outer, inner = reflected(first), reflected(second)
    return averaged(lambda z: outer(inner(z, step), step), tau)


def iterate(T: Map, z: np.ndarray, times: int) -> np.ndarray:
    """T^times z."""
    for _ in range(times):
        z = T(z)
    return z


def cayley_factor(step: float, l: float, L: float) -> float:  # noqa: E741 - the papers' symbol
    """Lipschitz constant of the Cayley operator of the gradient of an l-strongly convex, L-smooth
    function: max(|1 - s l|/(1 + s l), |1 - s L|/(1 + s L)), tight (Giselsson & Boyd 2017, Thm. 1).

    It is least at s = 1/sqrt(l L), where it is (sqrt(kappa) - 1)/(sqrt(kappa) + 1).
    """
    return max(abs(1.0 - step * c) / (1.0 + step * c) for c in (l, L))


# --- the two operators of the consensus problem ---------------------------------------------------


def gradients(problem: Problem) -> Map:
    """A itself: z -> (grad f_1(z_1), ..., grad f_N(z_N))."""

    @in_float64
    def values(z: np.ndarray) -> np.ndarray:
        return problem.map_clients(RowOracle.grad, _stacked_point(problem, z))

    return values


def proxes(problem: Problem) -> Resolvent:
    """The resolvent of A: every client's prox, u_k = argmin_u f_k(u) + |u - z_k|^2 / (2 s).

    Raises CapabilityError for a problem whose prox is inexact (a custom loss, or d > 500).
    """
    if problem.oracles.prox_method == "gradient":
        raise CapabilityError(
            f"the prox of the {problem.loss.name} loss with d = {problem.dim} takes gradient steps "
            "and is inexact: a resolvent needs a loss with a Hessian and d <= 500"
        )

    @in_float64
    def resolvent(z: np.ndarray, s: float) -> np.ndarray:
        return problem.map_clients(_prox, _stacked_point(problem, z), shared=(s,), prox=True)

    return resolvent


def consensus(g: Prox | None = None, n_clients: int | None = None) -> Resolvent:
    """The resolvent of B = N_C + n_clients dg: u_1 = u_2 = ... = prox of g at the mean of the rows.

    argmin_u n g(u) + sum_i |u - z_i|^2 / (2 s) is the prox of g with the step s n / rows; n is
    `n_clients`, by default the number of rows. A stack with further rows has clients without a
    function of their own, such as FedDR's server block, whose prox is the identity.
    """

    @in_float64
    def resolvent(z: np.ndarray, s: float) -> np.ndarray:
        rows, u = len(z), np.mean(z, axis=0)
        if g is not None:
            n = rows if n_clients is None else n_clients
            u = np.asarray(g.prox(jnp.asarray(u), s * n / rows))
        return np.broadcast_to(u, z.shape)

    return resolvent


def with_server_block(J: Resolvent) -> Resolvent:
    """The same on a stack with one row more, the last, on which it is the identity (f = 0)."""
    return lambda z, s: np.concatenate([J(z[:-1], s), z[-1:]])


def stacked(x: Any, rows: int) -> np.ndarray:
    """(rows, d): the point of consensus at x (d,)."""
    return np.tile(np.asarray(x, float), (rows, 1))


def _stacked_point(problem: Problem, z: np.ndarray) -> np.ndarray:
    """z as (N, d) floats; InputError for another shape."""
    shape = (problem.n_clients, problem.dim)
    if np.shape(z) != shape:
        raise InputError(f"a point of the stacked space has shape {shape}, got {np.shape(z)}")
    return np.asarray(z, float)


def _prox(oracle: RowOracle, z: Array, s: Array) -> Array:
    return oracle.prox(z, s, z)
