"""The tables that the command prints."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedexact.config import Outcome, Prepared, Run
from fedexact.data import Federation
from fedexact.report.files import distance_of, kept_row

ROOMY = 100  # columns; as many where the output is not a terminal
SHOWN = 12  # clients listed one by one
COLOURS = {  # from the best verdict to the worst
    "certified": "green",
    "not certified": "red",
    "cannot certify": "yellow",
    "-": "",
    "diverged": "red",
}


def console(quiet: bool = False) -> Console:
    """The terminal, or what stands for it."""
    found = Console(quiet=quiet, highlight=False)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = ROOMY
    return found


def data_summary(prepared: Prepared) -> RenderableType:
    """Rows and participation per client, the target in words, what is to be known of the data."""
    federation = prepared.data
    table = new_table("client", "rows used", "left out", "p_k")
    p = prepared.participation.inclusion(prepared.problem.n_clients)
    rows = list(zip(federation.names, federation.n_rows, federation.dropped, p, strict=True))
    for name, used, dropped, p_k in rows[: SHOWN if len(rows) > SHOWN else None]:
        table.add_row(escape(name), str(used), str(dropped), f"{p_k:.3g}")
    if len(rows) > SHOWN:
        table.add_row(f"... {len(rows) - SHOWN} more", "...", "...", "...")
    total, dropped = str(federation.n_rows.sum()), str(sum(federation.dropped))
    table.add_section()
    table.add_row("all", total, dropped, "")
    event = federation.target
    title = prepared.experiment.title
    lines = [
        f"data: {federation.source}, target {event}, {len(federation.feature_names)} columns",
        f"target of the fit: {prepared.problem.target()}",
        *_partition(federation),
        *(f"note: {note}" for note in (*federation.notes, *prepared.notes)),
    ]
    return Group(*([Text(title, style="bold")] if title else []), table, lines_of(lines))


def result_table(outcome: Outcome, width: int) -> Table:
    """One line per algorithm; with several seeds the median, and below it the worst.

    Readable from 80 columns on; closer together below 100.
    """
    table = new_table(
        "algorithm", "by\ntheory", "rounds", "MB\nup", "MB\ndown", "dist.\nSE", "dist.\nnorm",
        "bound\nSE", "verdict",
    )  # fmt: skip
    table.columns[1].justify = table.columns[8].justify = "left"
    if width < ROOMY:
        table.padding, table.show_edge = 0, False
    table.columns[8].no_wrap = True
    for label in outcome.prepared.algorithms:
        runs = outcome.of(label)
        table.add_row(*_row(label, runs, outcome.prepared))
    return table


def closing(outcome: Outcome, out: str, files: Sequence[str]) -> RenderableType:
    """What was chosen, what went wrong, and where the files are."""
    chosen = []
    for label in outcome.prepared.algorithms:
        values = outcome.of(label)[0].result.chosen
        if values:
            chosen.append(f"{label}: " + ", ".join(f"{k} = {_short(v)}" for k, v in values.items()))
    lines = [
        "dist.: distance to the pooled solution, of the worst coefficient in standard errors (SE) "
        "and as the norm |x - x*|; bound: what the certificate proves of it"
    ]
    if len(outcome.prepared.experiment.seeds) > 1:
        lines.append("first line: median over the seeds; second line: the worst")
    lines += [f"chosen automatically: {'; '.join(chosen)}"] if chosen else []
    for run in outcome.runs:
        if run.result.status == "diverged":
            lines.append(f"{run.label}, seed {run.seed}: {run.result.message}")
        if run.result.never_present:
            absent = _some(run.result.never_present)
            lines.append(f"{run.label}, seed {run.seed}: never present: {absent}")
    lines.append(f"written to {out}: {', '.join(files)}")
    return lines_of(lines)


def listing(sections: Mapping[str, Mapping[str, str]]) -> RenderableType:
    """Headed lists of names with one line each, in two columns."""
    width = max(len(name) for entries in sections.values() for name in entries)
    parts: list[RenderableType] = []
    for heading, entries in sections.items():
        grid = Table.grid(padding=(0, 2))
        grid.add_column(min_width=width, no_wrap=True)
        grid.add_column()
        for name, summary in entries.items():
            grid.add_row(escape(name), escape(summary))
        parts += [Text(heading, style="bold"), Padding(grid, (0, 0, 1, 2))]
    return Group(*parts)


def finished_line(run: Run) -> str:
    """One run in one line, for logs."""
    verdict = run.result.certificate.verdict if run.result.certificate else run.result.status
    return f"{run.label}, seed {run.seed}: {run.result.message}; {verdict}"


# --- details --------------------------------------------------------------------------------------


def _partition(federation: Federation) -> list[str]:
    made = federation.partition
    if made is None:
        return []
    return [f"partition: {made.description}, {made.sizes.min()} to {made.sizes.max()} rows each"]


def new_table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", vertical="top")
    return table


def lines_of(lines: Sequence[str]) -> Group:
    return Group(*(Text(line, overflow="fold") for line in lines))


def _row(label: str, runs: Sequence[Run], prepared: Prepared) -> list[RenderableType]:
    rows = [kept_row(run) for run in runs]
    bounds = [run.result.certificate and run.result.certificate.distance_bound_se for run in runs]
    exact = all(run.result.exactness.exact for run in runs)
    return [
        Text(label, style="bold"),
        "exact" if exact else "biased",
        _cell([run.result.rounds for run in runs], str),
        _cell([row["bytes_up"] / 1e6 for row in rows], megabytes),
        _cell([row["bytes_down"] / 1e6 for row in rows], megabytes),
        _cell([distance_of(run, prepared, True) for run in runs], power),
        _cell([distance_of(run, prepared, False) for run in runs], power),
        _cell(bounds, power),
        _verdict(runs),
    ]


def _cell(values: Sequence[float | None], show: Callable[[float], str]) -> str:
    """The value; of several the median, and below it the largest. A dash where there is none."""
    if any(value is None for value in values):
        return "-"
    numbers = [float(value) for value in values if value is not None]
    if show is str:
        show = lambda value: str(round(value))  # noqa: E731
    if len(numbers) == 1:
        return show(numbers[0])
    return f"{show(float(np.median(numbers)))}\n{show(max(numbers))}"


def _verdict(runs: Sequence[Run]) -> Text:
    """The worst verdict, with how many runs have it when not all do."""
    verdicts = [_verdict_of(run) for run in runs]
    worst = max(verdicts, key=list(COLOURS).index)
    text = worst if len(set(verdicts)) == 1 else f"{worst}\n({verdicts.count(worst)}/{len(runs)})"
    return Text(text, style=COLOURS[worst])


def _verdict_of(run: Run) -> str:
    if run.result.status == "diverged":
        return "diverged"
    return run.result.certificate.verdict if run.result.certificate else "-"


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def power(value: float) -> str:
    """Small numbers as powers of ten, others as they are."""
    if not math.isfinite(value):
        return "inf"
    return f"{value:.1e}" if value < 1e-2 or value >= 1e4 else f"{value:.3g}"


def megabytes(value: float) -> str:
    return f"{value:.3g}" if value >= 1 else f"{value:.2g}"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
