"""Distance to the pooled solution against rounds and against bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedexact.config import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by colour-blind readers; warm ones for biased algorithms.
EXACT = ("#0072B2", "#009E73", "#56B4E9", "#CC79A7", "#000000")
BIASED = ("#D55E00", "#E69F00", "#8C510A", "#B15928")
SHADE = "#009E73"
HEADINGS = ("exact by theory", "biased by theory", "the pooled answer")
MARKERS = "osD^vPX*"
REACHED = 1e-8  # standard errors: as good as the pooled answer for any purpose
FLOOR = 1e-16
HEADROOM = 1e3  # a curve that diverges is shown up to this multiple of the others
UNITS = {
    "distance_se": "distance to the pooled solution, standard errors",
    "distance": "distance to the pooled solution, |x − x*|",
    "gradient_mapping": "norm of the gradient mapping",
}
BIASED_LINES = ("--", "-.", ":")


class Curve(NamedTuple):
    """One run."""

    label: str
    exact: bool
    rounds: np.ndarray
    megabytes: np.ndarray  # up and down
    distance: np.ndarray
    diverged: bool = False


class Style(NamedTuple):
    color: str
    line: str
    width: float
    marker: str


def curves(outcome: Outcome) -> tuple[list[Curve], str]:
    """The runs' curves and the unit of their distance, in words."""
    runs = outcome.runs
    column = next(
        name
        for name in UNITS
        if all(run.result.history.column(name).null_count == 0 for run in runs)
    )
    found = []
    for run in runs:
        table = run.result.history
        up, down = (table.column(c).to_numpy() for c in ("bytes_up", "bytes_down"))
        exact = run.result.exactness.exact
        values = table.column(column).to_numpy()
        rounds = table.column("round").to_numpy()
        diverged = run.result.status == "diverged"
        found.append(Curve(run.label, exact, rounds, (up + down) / 1e6, values, diverged))
    return found, UNITS[column]


def convergence_figure(found: Sequence[Curve], unit: str, title: str) -> Figure:
    """Two panels with a common vertical axis, and one legend beside them.

    Exact algorithms are solid, cool lines; biased ones dashed, warm lines. A diverging curve
    leaves the panels at the top. Labels and title are shown as they are, not as mathematics.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    styles = _styles(found)
    for axes, name, xlabel in (
        (left, "rounds", "rounds"),
        (right, "megabytes", "communication, MB up and down"),
    ):
        labelled: set[str] = set()
        for curve in found:
            alpha = 0.6 if curve.label in labelled else 1.0  # further seeds
            labelled.add(curve.label)
            _draw(axes, getattr(curve, name), curve.distance, styles[curve.label], alpha)
        axes.set_xlabel(xlabel)
        axes.set_yscale("log")
        axes.set_xlim(left=0)
        axes.grid(visible=True, color="#DDDDDD", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    left.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    right.xaxis.set_major_locator(MaxNLocator(5))
    left.set_ylabel(unit)
    _limit(left, found)
    shaded = "standard errors" in unit
    if shaded:
        _shade(left, right)
    _legend(figure, found, styles, shaded)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", parse_math=False)
    return figure


def image(figure: Figure, format: str) -> bytes:
    """The figure as a PNG or SVG file; the same bytes for the same figure."""
    import matplotlib as mpl

    buffer = io.BytesIO()
    metadata = {"Date": None} if format == "svg" else None
    with mpl.rc_context({"svg.hashsalt": "fedexact", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=format, dpi=160, metadata=metadata)
    return buffer.getvalue()


def _styles(found: Sequence[Curve]) -> dict[str, Style]:
    styles: dict[str, Style] = {}
    count = {True: 0, False: 0}
    for curve in found:
        if curve.label not in styles:
            palette, i = (EXACT if curve.exact else BIASED), count[curve.exact]
            line = "-" if curve.exact else BIASED_LINES[i % len(BIASED_LINES)]
            width = 1.8 if curve.exact else 1.3
            marker = MARKERS[(i + i // len(palette)) % len(MARKERS)]  # not in step with the colours
            styles[curve.label] = Style(palette[i % len(palette)], line, width, marker)
            count[curve.exact] += 1
    return styles


def _draw(axes: Axes, x: np.ndarray, y: np.ndarray, style: Style, alpha: float) -> None:
    axes.plot(x, _shown(y), alpha=alpha, markevery=max(1, len(x) // 8), **_look(style))


def _shown(y: np.ndarray) -> np.ndarray:
    """As a log axis can show it."""
    return np.where(np.isfinite(y), np.maximum(y, FLOOR), np.nan)


def _look(style: Style) -> dict[str, Any]:
    return {
        "linestyle": style.line, "color": style.color, "linewidth": style.width,
        "marker": style.marker, "markersize": 4.5,
    }  # fmt: skip


def _limit(axes: Axes, found: Sequence[Curve]) -> None:
    """Keeps a diverging curve from flattening all others."""
    kept = [_shown(c.distance[:1] if c.diverged else c.distance) for c in found]
    top = HEADROOM * np.nanmax(np.concatenate(kept))
    values = np.concatenate([_shown(c.distance) for c in found])
    if np.nanmax(values) > top:
        axes.set_ylim(np.nanmin(values) / 2, top)


def _shade(left: Axes, right: Axes) -> None:
    """The region where the answer is the pooled one for any purpose."""
    bottom = min(left.get_ylim()[0], REACHED / 100)
    for axes in (left, right):
        axes.axhspan(bottom, REACHED, color=SHADE, alpha=0.10, linewidth=0, zorder=0)
        axes.axhline(REACHED, color=SHADE, linewidth=1.0, alpha=0.6, zorder=1)
    left.set_ylim(bottom=bottom)


def _legend(figure: Figure, found: Sequence[Curve], styles: dict[str, Style], shaded: bool) -> None:
    """One legend in groups, outside the panels."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    diverged = {curve.label for curve in found if curve.diverged}
    heading: Any = Line2D([], [], linestyle="none")
    entries: list[tuple[str, Any]] = []
    for exact, words in zip((True, False), HEADINGS, strict=False):
        labels = list(dict.fromkeys(c.label for c in found if c.exact == exact))
        if labels:
            entries.append((words, heading))
        for label in labels:
            text = f"{label} (diverged)" if label in diverged else label
            entries.append((text, Line2D([], [], **_look(styles[label]))))
    if shaded:
        entries += [(HEADINGS[2], heading)]
        entries += [("within 1e-8 SE", Patch(color=SHADE, alpha=0.25))]
    legend = figure.legend(
        [handle for _, handle in entries], ["label"] * len(entries),
        loc="outside right center", frameon=False, handlelength=3.2,
    )  # fmt: skip
    for shown, (text, handle) in zip(legend.get_texts(), entries, strict=True):
        shown.set_parse_math(False)
        shown.set_text(text)  # not given to `legend`, which drops labels with a leading underscore
        if handle is heading:
            shown.set_fontweight("bold")
