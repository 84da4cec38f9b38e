"""The data that come with the package."""

from __future__ import annotations

import dataclasses
from importlib import resources
from pathlib import Path
from typing import Any

from fedexact.data.columns import Target
from fedexact.data.federation import Federation, from_csv
from fedexact.errors import check_choice


@dataclasses.dataclass(frozen=True)
class Bundled:
    """One bundled table: a CSV file with a Markdown file of the same name about its origin."""

    file: str
    summary: str
    licence: str
    notes: tuple[str, ...]  # peculiarities, repeated in every result

    @property
    def path(self) -> Path:
        """Where the file lies on this machine."""
        return bundled_path(self.file)


BUNDLED = {
    "heart_disease_uci": Bundled(
        file="heart_disease_uci.csv",
        summary="920 patients of four hospitals (client column: dataset; disease: num > 0)",
        licence="CC BY 4.0, doi 10.24432/C52P4X (Janosi, Steinbrunn, Pfisterer, Detrano)",
        notes=(
            "the file is kept as it is: rows 405 and 406 and rows 860 and 908 (column id) are "
            "duplicates, and row 304, a Hungarian patient, is filed under Cleveland",
            "chol = 0 means unknown (all 123 rows of Switzerland, 49 of VA Long Beach) and is "
            "used as the number 0",
        ),
    ),
}
EXPERIMENTS = {
    "heart": "logistic regression in four hospitals that drop in and out, six algorithms",
    "heart_lasso": "the same with a lasso, three forms of FedDR",
}


def bundled(name: str, target: Target | str, **settings: Any) -> Federation:
    """The clients of a bundled table; `settings` as in `from_table`. Raises InputError."""
    check_choice("bundled", name, BUNDLED)
    entry = BUNDLED[name]
    return from_csv(entry.path, target, source=f"{name} (bundled)", notes=entry.notes, **settings)


def bundled_experiment(name: str) -> Path:
    """The path of a bundled experiment."""
    check_choice("experiment", name, EXPERIMENTS)
    return bundled_path(f"{name}.toml")


def bundled_path(file: str) -> Path:
    """The path of a file in the package's folder of bundled data."""
    return Path(str(resources.files("fedexact.data") / "bundled" / file))
