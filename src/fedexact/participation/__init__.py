"""Who takes part in each round: seeded, replayable patterns with their p_k and q_k."""

from __future__ import annotations

from fedexact.participation.base import Cohorts, Participation
from fedexact.participation.independent import Bernoulli, Categorical, Full, Sine, Uniform
from fedexact.participation.markov import Markov
from fedexact.participation.periodic import Cyclic, Trace

PARTICIPATIONS: dict[str, type[Participation]] = {
    pattern.name: pattern
    for pattern in (Full, Uniform, Bernoulli, Categorical, Markov, Cyclic, Sine, Trace)
}

__all__ = [
    "PARTICIPATIONS",
    "Bernoulli",
    "Categorical",
    "Cohorts",
    "Cyclic",
    "Full",
    "Markov",
    "Participation",
    "Sine",
    "Trace",
    "Uniform",
]
