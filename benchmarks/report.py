"""docs/benchmarks.md and its figure, made from the kept results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.result import FOLDER, Result, Table, Target, number, read

DOCS = Path(__file__).parents[1] / "docs"
ORDER = (
    "W1", "W2", "W3", "profile", "start", "memory", "algorithms", "answer", "powerlaw", "million",
    "sparse", "reference",
)  # fmt: skip
BARS = ("W1", "W2", "W3")
HEAD = """# Benchmarks

Made by `python -m benchmarks NAME --write`, each NAME on its own: {names}. Times are medians of
repeats that are interleaved with those of the other programs in the same run, so that a machine
whose speed drifts treats all alike: ratios matter, absolute times do not.

The other programs are installed by pip with pinned versions, each into its own environment, and
written the way their own examples are: benchmarks/peers/. fedexact is measured through `fx.solve`
in float64, and in float32 where it says so.
"""


def write() -> None:
    """Writes docs/benchmarks.md and docs/benchmarks.png."""
    results = {path.stem: read(path) for path in FOLDER.glob("*.json")}
    ordered = [results[name] for name in ORDER if name in results]
    (DOCS / "benchmarks.md").write_text(page(ordered))
    bars = [result for result in ordered if result.name in BARS]
    if bars:
        figure(bars).savefig(DOCS / "benchmarks.png", dpi=150)


def page(results: Sequence[Result]) -> str:
    """The whole document."""
    parts = [HEAD.format(names=", ".join(f"`{name}`" for name in ORDER))]
    targets = [target for result in results for target in result.targets]
    if targets:
        parts.append("## Targets\n\n" + markdown(_target_table(targets)))
    if any(result.name in BARS for result in results):
        parts.append("![ms a round of every program](benchmarks.png)\n")
    return "\n".join([*parts, *map(section, results), _versions(results)])


def section(result: Result) -> str:
    """One benchmark: its notes and tables."""
    parts = [f"## {result.title}", *result.notes, *map(markdown, result.tables)]
    parts.append(_where(result) if result.made else markdown(_target_table(result.targets)))
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _where(result: Result) -> str:
    ours = ("Python", "fedexact", "jax", "numpy")
    versions = ", ".join(f"{name} {result.versions[name]}" for name in ours)
    return f"{result.machine}; {versions}; {result.made}."


def markdown(table: Table) -> str:
    """The table in Markdown, numbers to the right."""
    if not table.rows:
        return ""
    marks = ["---", *["---:"] * (len(table.heading) - 1)]
    lines = [table.heading, marks, *table.rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def _target_table(targets: Iterable[Target]) -> Table:
    words = {True: "yes", False: "**no**", None: "not measured"}
    rows = [
        (
            target.what,
            f"{'at least' if target.at_least else 'at most'} {number(target.limit)}",
            number(target.measured),
            words[target.met],
        )
        for target in targets
    ]
    return Table(("what", "target", "measured", "met"), rows)


def _versions(results: Sequence[Result]) -> str:
    """The versions of the other programs."""
    found: dict[str, str] = {}
    for result in results:
        if result.name in BARS:
            for program in result.data["programs"]:
                versions = program.get("versions", {})
                found[program["label"]] = ", ".join(f"{n} {v}" for n, v in versions.items())
    rows = [(label, versions) for label, versions in found.items() if versions]
    return "## Versions\n\n" + markdown(Table(("program", "packages"), rows)) if rows else ""


def figure(results: Sequence[Result]) -> Figure:
    """Milliseconds a round of every program, one panel per workload, on a log scale."""
    drawing = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, result in zip(
        drawing.subplots(1, len(results), squeeze=False)[0], results, strict=True
    ):
        bars = sorted(result.bars.items(), key=lambda bar: -bar[1])
        labels, ms = zip(*bars, strict=True)
        colours = ["C1" if label.startswith("fedexact") else "C0" for label in labels]
        axes.barh(labels, ms, color=colours)
        axes.set_xscale("log")
        axes.set_xlabel("ms a round, median")
        axes.set_title(result.name)
        for y, value in enumerate(ms):
            axes.annotate(f" {number(value, 2)}", (value, y), va="center", fontsize=8)
        axes.margins(x=0.2)
        axes.tick_params(axis="y", labelsize=8)
    return drawing
