"""The algorithms, one file each, and their registry."""

from fedexact.algorithms.anderson import Anderson
from fedexact.algorithms.asyncfeddr import AsyncFedDR
from fedexact.algorithms.fedadmm import FedADMM
from fedexact.algorithms.fedau import FedAU
from fedexact.algorithms.fedavg import FedAvg
from fedexact.algorithms.fedawe import FedAWE
from fedexact.algorithms.feddr import FedDR
from fedexact.algorithms.feddyn import FedDyn
from fedexact.algorithms.fedpd import FedPD
from fedexact.algorithms.fedprox import FedProx
from fedexact.algorithms.fedsplit import FedSplit
from fedexact.algorithms.focus import FOCUS
from fedexact.algorithms.mifa import MIFA
from fedexact.algorithms.proxskip import ProxSkip
from fedexact.algorithms.pushnewton import PushNewton
from fedexact.algorithms.scaffold import SCAFFOLD
from fedexact.algorithms.sgfocus import SGFOCUS
from fedexact.algorithms.vrfocus import VRFOCUS
from fedexact.core import Algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {
    algorithm.name: algorithm
    for algorithm in (
        FedAvg,
        FedProx,
        SCAFFOLD,
        FedSplit,
        FedDR,
        FOCUS,
        SGFOCUS,
        VRFOCUS,
        MIFA,
        FedAU,
        FedAWE,
        ProxSkip,
        FedDyn,
        FedPD,
        FedADMM,
        AsyncFedDR,
        PushNewton,
        Anderson,
    )
}

__all__ = [
    "ALGORITHMS",
    "FOCUS",
    "MIFA",
    "SCAFFOLD",
    "SGFOCUS",
    "VRFOCUS",
    "Anderson",
    "AsyncFedDR",
    "FedADMM",
    "FedAU",
    "FedAWE",
    "FedAvg",
    "FedDR",
    "FedDyn",
    "FedPD",
    "FedProx",
    "FedSplit",
    "ProxSkip",
    "PushNewton",
]
