"""The code in the documentation runs and does what the text says."""

from __future__ import annotations

import re
import runpy
import sys
import types
from pathlib import Path

import pytest

import fedexact as fx

ROOT = Path(__file__).parents[1]


def python_blocks(path: Path) -> str:
    return "\n\n".join(re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL))


def test_adding_an_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's example runs, its closed form holds, and it passes the contract's core."""
    module = types.ModuleType("adding_an_algorithm")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(python_blocks(ROOT / "docs/adding_an_algorithm.md"), "page", "exec"), vars(module))
    algorithm = module.FedAvgM(local_steps=2)
    results = [
        fx.solve(module.problem, algorithm, fx.Bernoulli(0.5), rounds=20, engine=engine)
        for engine in ("compiled", "loop")
    ]
    assert results[0].x == pytest.approx(results[1].x, abs=1e-11)
    assert "lr" in results[0].chosen


PAGES = sorted(p.name for p in (ROOT / "docs").glob("*.md") if "adding" not in p.name)


@pytest.mark.parametrize("page", PAGES)
def test_code_on_the_other_pages_runs(page: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(python_blocks(ROOT / "docs" / page), page, "exec"), {"__name__": page})


def test_code_in_the_readme_runs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(python_blocks(ROOT / "README.md"), "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.slow
def test_the_table_in_the_readme_is_what_the_command_prints(tmp_path: Path) -> None:
    """All but the distances, which are rounding where the run has converged."""
    make = runpy.run_path(str(ROOT / "docs/make.py"))
    printed = make["table"](make["run"]("run", "--out", str(tmp_path)))
    written = re.search(r"```text\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert written is not None

    def cells(table: str) -> list[list[str]]:
        lines = [line.split(maxsplit=8) for line in table.splitlines()]
        return [[*line[:5], line[8]] for line in lines if line and line[0] in fx.ALGORITHMS]

    assert len(cells(printed)) == 6
    assert cells(printed) == cells(written[1])
