"""Readers, partitions and bundled data: from files to the clients of a problem."""

from fedexact.data.catalog import BUNDLED, EXPERIMENTS, Bundled, bundled, bundled_experiment
from fedexact.data.columns import Features, Target
from fedexact.data.federation import (
    Federation,
    from_csv,
    from_folder,
    from_libsvm,
    from_parquet,
    from_table,
)
from fedexact.data.handshake import Description, Encoded, Schema, Spec, agree, describe, encode
from fedexact.data.mapped import memory_map
from fedexact.data.moments import Moments, Sums, client_sums, pooled_moments, sums_of_clients
from fedexact.data.partition import (
    PARTITIONS,
    ByLabel,
    ByQuantity,
    Dirichlet,
    Iid,
    Partition,
    PartitionRecord,
)

__all__ = [
    "BUNDLED",
    "EXPERIMENTS",
    "PARTITIONS",
    "Bundled",
    "ByLabel",
    "ByQuantity",
    "Description",
    "Dirichlet",
    "Encoded",
    "Features",
    "Federation",
    "Iid",
    "Moments",
    "Partition",
    "PartitionRecord",
    "Schema",
    "Spec",
    "Sums",
    "Target",
    "agree",
    "bundled",
    "bundled_experiment",
    "client_sums",
    "describe",
    "encode",
    "from_csv",
    "from_folder",
    "from_libsvm",
    "from_parquet",
    "from_table",
    "memory_map",
    "pooled_moments",
    "sums_of_clients",
]
