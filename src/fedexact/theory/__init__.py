"""Where an algorithm ends up on a problem and how fast, without running it, and why.

`mixing` writes rounds as matrices, `monotone` composes splitting methods from resolvents, `bounds`
puts a problem's numbers into the published bounds. `fixed_point` tells where an algorithm ends up,
`rate` how fast, both from the round as one function (`rounds`) at the state where it settles
(`settling`). `predict` puts both, the cost of a round (`cost`) and the assumptions together,
`observe` what runs show of them, and `tune` finds the hyperparameters that cost least.
"""

from fedexact.theory import bounds, mixing, monotone
from fedexact.theory.cost import Cost, cost
from fedexact.theory.fixed_point import FixedPoint, fixed_point
from fedexact.theory.observe import Observation, observe
from fedexact.theory.rate import Rate, rate
from fedexact.theory.summary import Prediction, predict
from fedexact.theory.tune import Tuned, tune

__all__ = [
    "Cost",
    "FixedPoint",
    "Observation",
    "Prediction",
    "Rate",
    "Tuned",
    "bounds",
    "cost",
    "fixed_point",
    "mixing",
    "monotone",
    "observe",
    "predict",
    "rate",
    "tune",
]
