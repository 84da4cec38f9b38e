"""Makes the pictures and tables of README and docs: `python docs/make.py`, or only some of them:
`python docs/make.py heart registry measured panels bounds round`."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import fedexact as fx
from fedexact.report import image
from fedexact.solve import setting_of
from fedexact.theory.bounds import fedavg_bound, feddr_bound, fedsplit_bound
from fedexact.theory.cost import cost
from fedexact.theory.fixed_point import fixed_point
from fedexact.theory.mixing import draw_round
from fedexact.theory.observe import crossing

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "docs" / "algorithms" / "index.md"


def main() -> None:
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()


# --- README: the four hospitals -------------------------------------------------------------------


def heart() -> None:
    with tempfile.TemporaryDirectory() as folder:
        printed = run("run", "--out", folder)
        (ROOT / "docs" / "heart.png").write_bytes(Path(folder, "figure.png").read_bytes())
    insert(ROOT / "README.md", "heart", f"```text\n{table(printed)}\n```")


def run(*arguments: str) -> str:
    """What the command prints."""
    command = [sys.executable, "-m", "fedexact", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def table(printed: str) -> str:
    """The part of the output between blank lines in which the algorithms stand."""
    lines = "\n".join(line.rstrip() for line in printed.splitlines())
    return next(part for part in lines.split("\n\n") if "algorithm" in part and "verdict" in part)


# --- docs/algorithms: what the registry says ------------------------------------------------------

PARTIAL = fx.Bernoulli(0.5)
ORACLE = {
    "value": "value", "grad": "gradient", "stochastic_grad": "mini-batch gradient",
    "prox": "prox", "hessian": "Hessian",
}  # fmt: skip


def registry() -> None:
    insert(INDEX, "registry", registry_table())


def registry_table() -> str:
    """One line per algorithm, from its class and its defaults on a convex problem."""
    heading = (
        "algorithm", "by theory", "oracle", "numbers down + up", "participation",
        "guaranteed rate", "assumes", "reference",
    )  # fmt: skip
    return markdown(heading, [_registry_row(cls) for cls in fx.ALGORITHMS.values()])


def _registry_row(cls: type[fx.Algorithm]) -> list[str]:
    problem = least_squares(4, 9, 3)
    full, partial = (_words(cls, problem, pattern) for pattern in (fx.Full(), PARTIAL))
    setting = setting_of(problem, PARTIAL)
    assumptions = cls().resolve(setting).assumptions(setting)
    needs = [words for name, words in ORACLE.items() if name in cls.requires]
    needs += ["prox of g"] if cls.composite else []
    return [
        f"[{cls.name}]({cls.name}.md)",
        full if full == partial else f"{full} with everybody, else {partial}",
        ", ".join(needs),
        f"{numbers(cls, 'bytes_down')} + {numbers(cls, 'bytes_up')}",
        cls.participation,
        cls.rate,
        "; ".join(a.what for a in assumptions),
        cls.reference,
    ]


def _words(cls: type[fx.Algorithm], problem: fx.Problem, pattern: fx.Participation) -> str:
    setting = setting_of(problem, pattern)
    return "exact" if cls().resolve(setting).exactness(setting).exact else "biased"


def numbers(cls: type[fx.Algorithm], direction: str) -> str:
    """What a visit sends in one direction, in numbers of 8 bytes, as a polynomial of d."""
    n = [_per_visit(cls, direction, d) for d in (2, 3, 4, 5)]
    a = (n[2] - 2 * n[1] + n[0]) / 2
    b = n[1] - n[0] - 5 * a
    c = n[0] - 2 * b - 4 * a
    assert n[3] == 25 * a + 5 * b + c, cls.name
    over = max(a.denominator, b.denominator)
    terms = [_term(factor * over, power) for factor, power in ((a, "d²"), (b, "d"), (c, ""))]
    text = " + ".join(term for term in terms if term)
    return f"({text})/{over}" if over > 1 else text


def _per_visit(cls: type[fx.Algorithm], direction: str, d: int) -> Fraction:
    spent = cost(cls(), least_squares(2, d + 3, d))
    return Fraction(int(getattr(spent, direction)), 8 * int(spent.visits))


def _term(factor: Fraction, power: str) -> str:
    if factor == 0:
        return ""
    return power if factor == 1 and power else f"{factor}{power}"


# --- docs/algorithms: one measured line each ------------------------------------------------------

GOAL = 1e-8
ROUNDS = 1000


class Measured(NamedTuple):
    """What it took to come within GOAL of the pooled solution, or where it stayed."""

    rounds: float | None
    kilobytes: float
    gradients: float
    distance: float  # relative, median over the last fifth of the run
    diverged: bool

    @property
    def cells(self) -> list[str]:
        if self.diverged:
            return ["diverges", "", ""]
        if self.rounds is None:
            return [f"stays at {self.distance:.1g}", "", ""]
        return [f"{self.rounds:.0f}", f"{self.kilobytes:.0f}", f"{self.gradients:.0f}"]


def measured() -> None:
    insert(INDEX, "measured", measured_table())


def measured_table() -> str:
    heading = (
        "algorithm", "everybody: rounds", "kB", "row gradients", "Bernoulli(1/2): rounds", "kB",
        "row gradients",
    )  # fmt: skip
    rows = []
    for name in fx.ALGORITHMS:
        cells = [cell for pattern in (fx.Full(), PARTIAL) for cell in measure(name, pattern).cells]
        rows.append([name, *cells])
    return markdown(heading, rows)


def measure(name: str, pattern: fx.Participation) -> Measured:
    """One run with default hyperparameters on the problem of the table."""
    problem = least_squares(8, 40, 5)
    solution = fx.reference(problem)
    tol = 1e-3 * GOAL * float(np.linalg.norm(problem.grad(np.zeros(problem.dim))))
    result = fx.solve(
        problem, fx.ALGORITHMS[name](), pattern, rounds=ROUNDS, tol=tol, record_every=1,
        reference=solution,
    )  # fmt: skip
    history = result.history
    distance = history["distance"].to_numpy() / np.linalg.norm(solution)
    when = crossing(distance, GOAL / distance[0])
    last = float(np.median(distance[-max(1, len(distance) // 5) :]))
    if when is None:
        return Measured(None, np.nan, np.nan, last, result.status == "diverged")
    up, down = history["bytes_up"].to_numpy(), history["bytes_down"].to_numpy()
    spent = (history["round"].to_numpy(), (up + down) / 1e3)
    gradients = history["gradient_evaluations"].to_numpy()
    at = [float(a[int(np.ceil(when))]) for a in (*spent, gradients)]
    return Measured(at[0], at[1], at[2], last, False)


# --- docs: three panels, who stalls where ---------------------------------------------------------

PANELS: Mapping[str, fx.Participation] = {
    "everybody": fx.Full(),
    "4 of 16, uniform": fx.Uniform(4),
    "4 of 16, uneven": fx.Categorical(tuple(np.linspace(1.0, 5.0, 16)), 4),
}
LINES: Mapping[str, fx.Algorithm] = {
    "FedAvg": fx.FedAvg(local_steps=3),
    "FedAU": fx.FedAU(local_steps=3),
    "MIFA": fx.MIFA(local_steps=3),
    "SCAFFOLD": fx.SCAFFOLD(local_steps=3),
    "FOCUS": fx.FOCUS(local_steps=3),
    "VRFOCUS, 100 rows": fx.VRFOCUS(local_steps=3, batch_size=100),
}
COLOURS = ("#D55E00", "#E69F00", "#8C510A", "#009E73", "#0072B2", "#56B4E9")
MARKERS = "osDv^P"
PANEL_ROUNDS = 600
PREDICTED: Mapping[str, Any] = {"color": "black", "linestyle": ":", "linewidth": 1.3, "zorder": 5}


class Line(NamedTuple):
    """One run of a panel, and where theory says that it stays."""

    label: str
    rounds: np.ndarray
    distance: np.ndarray  # relative
    level: float  # relative, predicted; 0 for exact


def panels() -> None:
    (ROOT / "docs" / "panels.png").write_bytes(image(panels_figure(panel_lines()), "png"))


def panels_problem() -> fx.Problem:
    """Random least squares: 16 clients, 500 rows each, d = 50, noise 0.1."""
    rng = np.random.default_rng(0)
    x, clients = rng.normal(size=50), []
    for _ in range(16):
        X = rng.normal(size=(500, 50)) * (0.5 + rng.random(50))
        clients.append((X, X @ x + 0.1 * rng.normal(size=500)))
    return fx.Problem(clients, loss="squared")


def panel_lines() -> dict[str, list[Line]]:
    problem = panels_problem()
    solution = fx.reference(problem)
    return {
        title: [panel_line(label, problem, pattern, solution) for label in LINES]
        for title, pattern in PANELS.items()
    }


def panel_line(
    label: str, problem: fx.Problem, pattern: fx.Participation, solution: np.ndarray
) -> Line:
    algorithm, size = LINES[label], float(np.linalg.norm(solution))
    result = fx.solve(
        problem, algorithm, pattern, rounds=PANEL_ROUNDS, record_every=2, reference=solution
    )
    history = result.history
    level = 0.0
    if not result.exactness.exact:
        point = fixed_point(algorithm, problem, pattern)
        level = float(np.hypot(point.distance, point.spread)) / size
    return Line(label, history["round"].to_numpy(), history["distance"].to_numpy() / size, level)


def panels_figure(found: Mapping[str, list[Line]]) -> Figure:
    """Relative error against rounds; dotted where theory says that it stays."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, (title, lines) in zip(
        figure.subplots(1, len(found), sharey=True), found.items(), strict=True
    ):
        for line, colour, marker in zip(lines, COLOURS, MARKERS, strict=True):
            every = max(1, len(line.rounds) // 7)
            axes.plot(
                line.rounds, np.maximum(line.distance, 1e-16), color=colour, marker=marker,
                markevery=(MARKERS.index(marker) * every // 6, every), markersize=4.5,
                linewidth=1.6, label=line.label,
            )  # fmt: skip
            if line.level:
                axes.axhline(line.level, **PREDICTED)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("rounds")
        axes.set_yscale("log")
        axes.set_xlim(0, PANEL_ROUNDS)
        axes.grid(visible=True, color="#DDDDDD", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("relative error, |x − x*| / |x*|")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    handles.append(Line2D([], [], **PREDICTED))
    figure.legend(
        handles, [*labels, "stays there,\nby theory"], loc="outside right center", frameon=False
    )
    return figure


# --- docs: bounds over runs -----------------------------------------------------------------------


class Bounded(NamedTuple):
    """What a bound is about over a run, after each of its rounds."""

    title: str
    quantity: str
    observed: np.ndarray
    bound: np.ndarray


def bounded_runs() -> None:
    (ROOT / "docs" / "bounds.png").write_bytes(image(bounds_figure(bounded()), "png"))


def bounded() -> list[Bounded]:
    """Two runs on the smallest example, and one on a nonconvex loss; everybody present."""
    rows = [([[0.0], [1.0]], [2.0, 2.0]), ([[2.0], [2.0]], [0.0, 1.0])]
    two = fx.Problem(rows, loss="squared", weights="clients", reduction="sum")

    def distances(algorithm: fx.Algorithm, rounds: int) -> np.ndarray:
        run = fx.solve(two, algorithm, rounds=rounds, record_every=1, reference=fx.reference(two))
        return run.history["distance"].to_numpy()[1:]

    split = fx.FedSplit(step=8**-0.5, relax=1.0)
    drift = fx.FedAvg(lr=0.01, local_steps=5)
    robust, L = robust_regression()
    dr = fx.FedDR(step=0.2 / L, relax=1.0)
    mapping = fx.solve(robust, dr, rounds=300, record_every=1).history["gradient_mapping"]
    t, squares = np.arange(1, 301), mapping.to_numpy()[1:] ** 2
    return [
        Bounded(
            "FedSplit", "|x − x*|", distances(split, 40), fedsplit_bound(split, two).curve(40)[1]
        ),
        Bounded("FedAvg", "|x − x*|", distances(drift, 60), fedavg_bound(drift, two).curve(60)[1]),
        Bounded(
            "FedDR, nonconvex", "mean of |∇F|² so far", np.cumsum(squares) / t,
            feddr_bound(dr, robust, smoothness=L, lowest=0.0).at(t),
        ),
    ]  # fmt: skip


def robust_regression() -> tuple[fx.Problem, float]:
    """Two clients with outliers under a bounded loss, and L of their f_k."""
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(60, 2)) for _ in range(2)]
    x = np.array([1.0, -1.0])
    clients = [(X, X @ x + 0.3 * rng.standard_cauchy(60)) for X in rows]
    L = 2.0 * max(float(np.linalg.norm(X, 2)) ** 2 / 60 for X in rows)  # second derivatives <= 2
    return fx.Problem(clients, loss=geman_mcclure), L


def geman_mcclure(x: Any, rows: fx.Rows) -> Any:
    """r²/(1 + r²) of the residual r: bounded, and not convex."""
    square = (rows.X @ x - rows.y) ** 2
    return square / (1.0 + square)


def bounds_figure(found: list[Bounded]) -> Figure:
    """Each run with its bound above it."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, one in zip(figure.subplots(1, len(found)), found, strict=True):
        t = np.arange(1, len(one.observed) + 1)
        axes.plot(t, one.bound, color="black", linestyle="--", linewidth=1.4, label="bound")
        axes.plot(t, np.maximum(one.observed, 1e-16), color="#0072B2", linewidth=1.8, label="run")
        axes.set_title(one.title, fontsize=11)
        axes.set_xlabel("rounds")
        axes.set_ylabel(one.quantity)
        axes.set_yscale("log")
        axes.grid(visible=True, color="#DDDDDD", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return figure


# --- shared ---------------------------------------------------------------------------------------


def least_squares(N: int, n: int, d: int, noise: float = 1.0, seed: int = 0) -> fx.Problem:
    """N clients with n rows and d columns; scales and coefficients differ between the clients."""
    rng = np.random.default_rng(seed)
    shared, clients = rng.normal(size=d), []
    for _ in range(N):
        X = rng.normal(size=(n, d)) * (1 + rng.random(d))
        own = shared + 0.3 * rng.normal(size=d)
        clients.append((X, X @ own + noise * rng.normal(size=n)))
    return fx.Problem(clients, loss="squared")


def markdown(heading: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in escaped)


def insert(path: Path, name: str, text: str) -> None:
    """Puts `text` between the marks <!-- name: ... --> and <!-- /name --> of a page."""
    pattern = rf"(<!-- {name}:.*?-->\n).*?(<!-- /{name} -->)"
    page, count = re.subn(
        pattern, lambda m: f"{m[1]}{text}\n{m[2]}", path.read_text(), flags=re.DOTALL
    )
    assert count == 1, f"{path} has no mark {name}"
    path.write_text(page)


def inserted(path: Path, name: str) -> str:
    """What stands between the marks."""
    found = re.search(rf"<!-- {name}:.*?-->\n(.*?)\n<!-- /{name} -->", path.read_text(), re.DOTALL)
    assert found is not None, f"{path} has no mark {name}"
    return found[1]


# --- docs/mixing.md: one round as a graph ---------------------------------------------------------


def one_round() -> None:
    (ROOT / "docs" / "round.png").write_bytes(image(draw_round([1, 0, 1, 1, 0]), "png"))


PARTS: Mapping[str, Callable[[], None]] = {
    "heart": heart, "registry": registry, "measured": measured, "panels": panels,
    "bounds": bounded_runs, "round": one_round,
}  # fmt: skip

if __name__ == "__main__":
    main()
