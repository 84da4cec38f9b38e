"""fedexact: federated optimisation that lands on the exact pooled answer, and proves it.

import fedexact as fx

problem = fx.Problem([(X1, y1), (X2, y2)], loss="logistic", fit_intercept=True)
result = fx.solve(problem, fx.FOCUS(), fx.Bernoulli([0.9, 0.4]), rounds=2000)
print(result.certificate)
"""

from fedexact.algorithms import (
    ALGORITHMS,
    FOCUS,
    MIFA,
    SCAFFOLD,
    SGFOCUS,
    VRFOCUS,
    Anderson,
    AsyncFedDR,
    FedADMM,
    FedAU,
    FedAvg,
    FedAWE,
    FedDR,
    FedDyn,
    FedPD,
    FedProx,
    FedSplit,
    ProxSkip,
    PushNewton,
)
from fedexact.certificate import Certificate, certify
from fedexact.clients import Clients
from fedexact.core import Algorithm, Constants, Exactness, Oracle, Setting, record, static
from fedexact.devices import cache_programs
from fedexact.errors import (
    CapabilityError,
    DivergenceWarning,
    FedexactError,
    IdleCoresWarning,
    InputError,
)
from fedexact.losses import (
    LOSSES,
    CustomLoss,
    Huber,
    Logistic,
    Loss,
    Multinomial,
    Poisson,
    Rows,
    Squared,
)
from fedexact.participation import (
    PARTICIPATIONS,
    Bernoulli,
    Categorical,
    Cyclic,
    Full,
    Markov,
    Participation,
    Sine,
    Trace,
    Uniform,
)
from fedexact.problem import Problem
from fedexact.reference import reference
from fedexact.regularizers import (
    L1,
    REGULARIZERS,
    Box,
    ElasticNet,
    GroupLasso,
    L2Ball,
    NonNegative,
    Regularizer,
    SquaredL2,
    Zero,
)
from fedexact.result import Result
from fedexact.solve import Interrupted, Progress, solve

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "FOCUS",
    "L1",
    "LOSSES",
    "MIFA",
    "PARTICIPATIONS",
    "REGULARIZERS",
    "SCAFFOLD",
    "SGFOCUS",
    "VRFOCUS",
    "Algorithm",
    "Anderson",
    "AsyncFedDR",
    "Bernoulli",
    "Box",
    "CapabilityError",
    "Categorical",
    "Certificate",
    "Clients",
    "Constants",
    "CustomLoss",
    "Cyclic",
    "DivergenceWarning",
    "ElasticNet",
    "Exactness",
    "FedADMM",
    "FedAU",
    "FedAWE",
    "FedAvg",
    "FedDR",
    "FedDyn",
    "FedPD",
    "FedProx",
    "FedSplit",
    "FedexactError",
    "Full",
    "GroupLasso",
    "Huber",
    "IdleCoresWarning",
    "InputError",
    "Interrupted",
    "L2Ball",
    "Logistic",
    "Loss",
    "Markov",
    "Multinomial",
    "NonNegative",
    "Oracle",
    "Participation",
    "Poisson",
    "Problem",
    "Progress",
    "ProxSkip",
    "PushNewton",
    "Regularizer",
    "Result",
    "Rows",
    "Setting",
    "Sine",
    "Squared",
    "SquaredL2",
    "Trace",
    "Uniform",
    "Zero",
    "cache_programs",
    "certify",
    "record",
    "reference",
    "solve",
    "static",
]
