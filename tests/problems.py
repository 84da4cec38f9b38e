"""Problems and participations that several test files share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import fedexact as fx
from fedexact.engines import compiled
from fedexact.losses import Huber, Logistic, Loss, Multinomial, Poisson, Squared


def fast_only(names: Iterable[str], fast: Iterable[str]) -> list[Any]:
    """These names, for `pytest.mark.parametrize`; those that are not `fast` marked as slow."""
    few = set(fast)
    return [name if name in few else pytest.param(name, marks=pytest.mark.slow) for name in names]


def programs() -> int:
    """Programs that the compiled engine has compiled so far."""
    return compiled._advance._cache_size()  # pyright: ignore[reportAttributeAccessIssue]


def least_squares(
    seed: int, n_rows: tuple[int, ...] = (8, 8, 8, 8), d: int = 3, **kwargs: Any
) -> fx.Problem:
    """Clients whose rows and coefficients differ."""
    rng = np.random.default_rng(seed)
    clients = []
    for n in n_rows:
        X = rng.normal(size=(n, d)) * (1 + rng.random(d))
        clients.append((X, X @ rng.normal(size=d) + 0.1 * rng.normal(size=n)))
    return fx.Problem(clients, loss="squared", **kwargs)


def logistic(
    seed: int, n_rows: tuple[int, ...] = (20, 20, 20, 20), d: int = 3, **kwargs: Any
) -> fx.Problem:
    """Clients whose coefficients differ; a ridge unless told otherwise."""
    rng = np.random.default_rng(seed)
    clients = []
    for n in n_rows:
        X = rng.normal(size=(n, d))
        clients.append((X, (X @ rng.normal(size=d) + rng.normal(size=n) > 0).astype(float)))
    return fx.Problem(clients, loss="logistic", **{"l2": 0.1, **kwargs})


LOSS_CASES: dict[str, Loss] = {
    "squared": Squared(),
    "logistic": Logistic(),
    "multinomial2": Multinomial(2),
    "multinomial4": Multinomial(4),
    "poisson": Poisson(),
    "huber": Huber(0.7),
}


def targets_for(loss: Loss, m: int, rng: np.random.Generator) -> np.ndarray:
    """(m,) targets that the loss takes."""
    if isinstance(loss, Logistic):
        return rng.integers(2, size=m).astype(float)
    if isinstance(loss, Multinomial):
        return rng.integers(loss.n_classes, size=m).astype(float)
    if isinstance(loss, Poisson):
        return rng.poisson(2.0, size=m).astype(float)
    return rng.normal(size=m)


def random_targets(loss: str, eta: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Targets for the linear predictors `eta`; three classes at random for "multinomial"."""
    n = len(eta)
    return {
        "squared": lambda: eta + rng.normal(size=n),
        "huber": lambda: eta + rng.standard_t(1.5, size=n),
        "logistic": lambda: (rng.random(n) < 1 / (1 + np.exp(-eta))).astype(float),
        "poisson": lambda: rng.poisson(np.exp(eta)).astype(float),
        "multinomial": lambda: rng.permutation(np.arange(n) % 3).astype(float),
    }[loss]()


ALGORITHMS: dict[str, Callable[[], fx.Algorithm]] = {
    "FedAvg": lambda: fx.FedAvg(local_steps=3),
    "FedAvg batch": lambda: fx.FedAvg(local_steps=3, batch_size=4),
    "FedProx": lambda: fx.FedProx(),
    "SCAFFOLD 1": lambda: fx.SCAFFOLD(local_steps=3, option=1),
    "SCAFFOLD 2": lambda: fx.SCAFFOLD(local_steps=3, option=2),
    "FedSplit": lambda: fx.FedSplit(),
    "FedSplit half": lambda: fx.FedSplit(relax=0.5),
    "FedSplit per client": lambda: fx.FedSplit(per_client=True),
    "FedDR": lambda: fx.FedDR(),
    "FedDR block": lambda: fx.FedDR(server_block=True),
    "FOCUS": lambda: fx.FOCUS(),
    "FOCUS 3": lambda: fx.FOCUS(local_steps=3),
    "SGFOCUS 3": lambda: fx.SGFOCUS(local_steps=3, batch_size=4),
    "VRFOCUS": lambda: fx.VRFOCUS(batch_size=4),
    "VRFOCUS 3": lambda: fx.VRFOCUS(local_steps=3, batch_size=2),
    "MIFA": lambda: fx.MIFA(local_steps=3),
    "FedAU": lambda: fx.FedAU(local_steps=3, cutoff=4),
    "FedAWE": lambda: fx.FedAWE(local_steps=3),
    "ProxSkip": lambda: fx.ProxSkip(),
    "FedDyn": lambda: fx.FedDyn(),
    "FedPD": lambda: fx.FedPD(),
    "FedPD 3": lambda: fx.FedPD(local_steps=3),
    "FedADMM": lambda: fx.FedADMM(),
    "AsyncFedDR": lambda: fx.AsyncFedDR(delay=3),
    "PushNewton": lambda: fx.PushNewton(),
    "Anderson": lambda: fx.Anderson(),
    "Anderson DR": lambda: fx.Anderson(inner=fx.FedDR(), memory=2),
}

PARTICIPATIONS: dict[str, fx.Participation] = {
    "full": fx.Full(),
    "uniform": fx.Uniform(2),
    "bernoulli": fx.Bernoulli([0.9, 0.6, 0.4, 0.2]),
    "rare": fx.Bernoulli(0.26),  # 30 % of the rounds are empty
    "categorical": fx.Categorical([4.0, 3.0, 2.0, 1.0], 2),
    "markov": fx.Markov(0.3, 0.4),
    "cyclic": fx.Cyclic(2),
    "sine": fx.Sine(0.5, 0.8, 7),
}

# What follows the rounds in an experiment file on a table.csv with the columns site, age, dose, y.
THREE_SITES = """\
[data]
csv = "table.csv"
client = "site"
target = "y"
features = ["age", "dose"]
standardize = true
[problem]
loss = "logistic"
fit_intercept = true
l2 = 0.1
[participation]
name = "bernoulli"
p = [0.9, 0.5, 0.7]
[[algorithms]]
name = "FedAvg"
[[algorithms]]
name = "FOCUS"
"""
