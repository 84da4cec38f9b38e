"""The algorithms, one file each, and their registry."""

from fedexact.algorithms.fedavg import FedAvg
from fedexact.algorithms.feddr import FedDR
from fedexact.algorithms.fedprox import FedProx
from fedexact.algorithms.fedsplit import FedSplit
from fedexact.algorithms.focus import FOCUS
from fedexact.algorithms.scaffold import SCAFFOLD
from fedexact.core import Algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {
    algorithm.name: algorithm for algorithm in (FedAvg, FedProx, SCAFFOLD, FedSplit, FedDR, FOCUS)
}

__all__ = ["ALGORITHMS", "FOCUS", "SCAFFOLD", "FedAvg", "FedDR", "FedProx", "FedSplit"]
