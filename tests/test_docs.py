"""The code in the documentation runs and does what the text says."""

from __future__ import annotations

import re
import runpy
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import fedexact as fx
from problems import fast_only

ROOT = Path(__file__).parents[1]
MAKE = runpy.run_path(str(ROOT / "docs/make.py"))


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


DOCS = ROOT / "docs"
PAGES = sorted(
    str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if "adding" not in path.name
)


LONG = ("theory.md", "certificate.md", "problem.md", "scale.md", "algorithms/Anderson.md")


@pytest.mark.parametrize("page", fast_only(PAGES, set(PAGES) - set(LONG)))
def test_code_on_the_other_pages_runs(page: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(python_blocks(DOCS / page), page, "exec"), {"__name__": page})


@pytest.mark.parametrize("page", ["../README.md", *PAGES])
def test_links_lead_somewhere(page: str) -> None:
    folder = (DOCS / page).parent
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (DOCS / page).read_text()):
        assert target.startswith("http") or (folder / target).exists(), target


def test_every_algorithm_has_a_page_of_its_own() -> None:
    """And every page belongs to one, but for these."""
    pages = {path.stem for path in (DOCS / "algorithms").glob("*.md")}
    assert pages - set(fx.ALGORITHMS) == {"index", "smallest_example", "wrong_in_print"}
    assert set(fx.ALGORITHMS) <= pages
    for name, cls in fx.ALGORITHMS.items():
        text = (DOCS / "algorithms" / f"{name}.md").read_text()
        assert text.startswith(f"# {name}\n"), name
        for words in ("local", "push", "R(S)", "```python"):
            assert words in text, (name, words)
        surname = re.findall(r"[A-Z][\w-]+", cls.reference)[0]
        assert surname in text, (name, surname)


def test_code_in_the_readme_runs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(python_blocks(ROOT / "README.md"), "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.slow
def test_the_table_in_the_readme_is_what_the_command_prints(tmp_path: Path) -> None:
    """All but the distances, which are rounding where the run has converged."""
    printed = MAKE["table"](MAKE["run"]("run", "--out", str(tmp_path)))
    written = re.search(r"```text\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert written is not None

    def cells(table: str) -> list[list[str]]:
        lines = [line.split(maxsplit=8) for line in table.splitlines()]
        return [[*line[:5], line[8]] for line in lines if line and line[0] in fx.ALGORITHMS]

    assert len(cells(printed)) == 6
    assert cells(printed) == cells(written[1])


@pytest.mark.slow
def test_the_table_of_the_algorithms_is_what_the_registry_says() -> None:
    assert MAKE["inserted"](MAKE["INDEX"], "registry") == MAKE["registry_table"]()


@pytest.mark.slow
def test_the_measured_table_is_what_comes_out() -> None:
    """Numbers to 2 %: when a tolerance is crossed may change with the last bits."""

    def cells(table: str) -> list[list[str]]:
        return [line.strip("| ").split(" | ") for line in table.splitlines()]

    written = cells(MAKE["inserted"](MAKE["INDEX"], "measured"))
    found = cells(MAKE["measured_table"]())
    assert [line[0] for line in written] == [line[0] for line in found]
    for before, now in zip(written[2:], found[2:], strict=True):
        for old, new in zip(before, now, strict=True):
            if old.isdigit() and new.isdigit():
                assert float(new) == pytest.approx(float(old), rel=0.02, abs=1), before[0]
            else:
                assert old == new, before[0]


@pytest.mark.slow
def test_the_runs_in_the_picture_of_bounds_stay_below_them() -> None:
    """And the bounds say something: within 3 of FedSplit, 2 of FedAvg's drift, 20 of FedDR."""
    for one, close in zip(MAKE["bounded"](), (3.0, 2.0, 20.0), strict=True):
        assert np.all(one.observed <= one.bound * (1 + 1e-9)), one.title
        assert one.bound[-1] <= close * one.observed[-1], one.title
