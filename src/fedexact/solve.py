"""The one entry point: run an algorithm on a problem and say whether it is the pooled answer."""

from __future__ import annotations

import dataclasses
import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from fedexact.bounds import point_sums
from fedexact.certificate import certify
from fedexact.core import Algorithm, Setting, in_float64, root_key
from fedexact.engines import Engine, State, engine_of
from fedexact.engines.state import Recording, initial, part_for
from fedexact.errors import (
    CapabilityError,
    DivergenceWarning,
    InputError,
    check_count,
    check_positive,
    check_seed,
)
from fedexact.objective import Objective, summable
from fedexact.oracles import RowOracle
from fedexact.participation import Full, Participation
from fedexact.problem import Problem
from fedexact.regularizers import Zero
from fedexact.result import HISTORY, Result, by_field, from_fields, hyperparameters

GROWTH = 1e3  # a run whose gradient mapping exceeds the gradients at x0 so often is stopped
RECORDINGS = 100  # in a run, unless record_every says otherwise
AHEAD = 0.1  # seconds of rounds between two looks at their recordings, if there are several in it
DRAWN = 1 << 20  # participants that are drawn at once


class Progress(NamedTuple):
    """What a callback sees at each recording."""

    round: int
    rounds: int
    objective: float
    gradient_mapping: float
    distance: float | None
    result: Callable[[], Result]  # the run so far, as if interrupted here


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `solve`; `result` holds the rounds done and can be resumed."""

    def __init__(self, result: Result) -> None:
        super().__init__(f"interrupted after {result.rounds} rounds")
        self.result = result


@in_float64
def solve(
    problem: Problem,
    algorithm: Algorithm,
    participation: Participation | None = None,
    rounds: int = 1000,
    tol: float | None = None,
    seed: int = 0,
    engine: str = "compiled",
    record_every: int | None = None,
    x0: Any = None,
    reference: Any = None,
    reference_se: Any = None,
    resume: Result | None = None,
    callback: Callable[[Progress], None] | None = None,
    diagnostics: bool = False,
    precision: str = "double",
) -> Result:
    """Runs `algorithm` on `problem` and certifies where it landed.

    Args:
        problem: the target.
        algorithm: for example `fx.FOCUS()`; hyperparameters left out are chosen from the constants
            and the participation and reported in `Result.chosen`.
        participation: who shows up in each round; everybody if left out.
        rounds: at most so many in all, those of `resume` included.
        tol: stop at the first recorded round whose gradient mapping norm is <= tol. A small step
            is never convergence.
        seed: of participation and mini-batches; the same seed replays the run bit for bit.
        engine: "compiled", "loop" or "matrix"; the same numbers.
        record_every: rounds between two rows of the history, by default rounds / 100. A recording
            costs one pass over all rows.
        x0: (d,) start, zeros if left out.
        reference: (d,) solution to measure the history's `distance` against.
        reference_se: (d,) its standard errors, for the history's `distance_se`.
        resume: a Result of the same run stopped earlier; the outcome is that of the uninterrupted
            run bit for bit.
        callback: called at each recording; where rounds are fast, some late, `AHEAD` at most.
        diagnostics: also record `local_distance` and `local_change`, the two quantities that
            control FedDR (the clients' models against the server's, and against their last).
        precision: of the rounds and recordings, "double" or "single" (float32, of the compiled
            engine): faster, and never closer than about 1e-6 (relative) to the pooled answer. The
            certificate is in double precision in any case; go on from there with `x0=result.x`.

    Returns:
        Result. A run that diverges (non-finite values, or growing) is stopped with a
        DivergenceWarning; its last good state is kept and the message says what to lower.

    Raises:
        InputError: a value that cannot be used, before anything is compiled.
        CapabilityError: the algorithm cannot handle the problem.
        Interrupted: on Ctrl-C, with the Result so far.
    """
    participation = Full() if participation is None else participation
    target = (tol, reference, reference_se)
    run = _Run.prepare(
        problem, algorithm, participation, rounds, seed, engine_of(engine, precision), record_every,
        x0, target, resume, diagnostics, precision,
    )  # fmt: skip
    try:
        return run.go(callback)
    except KeyboardInterrupt:
        raise Interrupted(run.interrupted()) from None


@dataclasses.dataclass(frozen=True)
class _Target:
    """When to stop and what to measure against."""

    tol: float | None
    reference: np.ndarray | None
    se: np.ndarray | None

    @staticmethod
    def of(problem: Objective, tol: float | None, reference: Any, se: Any) -> _Target:
        check_positive("tol", tol)
        if reference is not None:
            reference = problem.check_model(reference)
        if se is not None:
            se = np.asarray(se, float)
            if reference is None or se.shape != (problem.dim,) or not np.all(se > 0):
                raise InputError(
                    f"reference_se needs a reference and {problem.dim} positive numbers"
                )
        return _Target(tol, reference, se)

    def distances(self, x: np.ndarray) -> tuple[float | None, float | None]:
        if self.reference is None:
            return None, None
        error = x - self.reference
        se = None if self.se is None else float(np.max(np.abs(error) / self.se))
        return float(np.linalg.norm(error)), se


class _Done(NamedTuple):
    """What a run has done so far; replaced as a whole, so that Ctrl-C finds it complete."""

    state: State
    round: int
    uploads: int
    gradients: int  # of rows
    seen: np.ndarray  # (N,) bool
    history: tuple[dict[str, Any], ...]
    good: _Good


class _Good(NamedTuple):
    """The recording of least gradient mapping; its state is that of `since` some rounds later."""

    mapping: float
    round: int
    since: State
    start: int  # round of `since`


@dataclasses.dataclass
class _Run:
    """One run: what is fixed, and what has been done."""

    problem: Problem
    algorithm: Algorithm
    given: Algorithm
    setting: Setting
    participation: Participation
    rounds: int
    record_every: int
    seed: int
    engine: Engine
    target: _Target
    initial: tuple[Any, Any]  # server state, client states stacked
    bytes_down: int  # what one participant receives in one round
    bytes_up: int  # and what it sends
    identity: dict[str, Any]
    diagnostics: bool
    done: _Done
    pace: float = 0.0  # rounds a second of late
    told: list[int] = dataclasses.field(default_factory=list)  # recordings beyond those of `done`

    @staticmethod
    def prepare(
        problem: Problem,
        given: Algorithm,
        participation: Participation,
        rounds: int,
        seed: int,
        engine: Engine,
        record_every: int | None,
        x0: Any,
        target: tuple[Any, Any, Any],
        resume: Result | None,
        diagnostics: bool,
        precision: str,
    ) -> _Run:
        check_kind("problem", problem, Problem)
        check_kind("participation", participation, Participation)
        check_kind("resume", resume, Result | None)
        check_count("rounds", rounds)
        check_seed("seed", seed)
        if record_every is None:
            record_every = max(1, rounds // RECORDINGS)
        check_count("record_every", record_every)
        participation.check(problem.n_clients, problem.names)
        check_fit(problem, given)
        setting = setting_of(problem, participation, seed)
        algorithm = given.resolve(setting)
        x0 = np.zeros(problem.dim) if x0 is None else problem.check_model(x0)
        problem.compile_sums(point_sums(problem), x0)
        state = initial(algorithm, problem, jnp.asarray(x0))
        down, up = bytes_per_visit(algorithm, problem, *state, single=precision == "single")
        identity = {
            "seed": seed,
            "participation": repr(participation),
            "target": problem.target(),
            "rows": problem.fingerprint,
            "clients": problem.names,
            "x0": x0.tolist(),
            "precision": precision,
        }
        run = _Run(
            problem, algorithm, given, setting, participation, rounds, record_every, seed,
            engine, _Target.of(problem, *target), state, down, up, identity, diagnostics,
            cast(Any, None),
        )  # fmt: skip
        run.done = run.fresh() if resume is None else run.resumed(resume)
        return run

    def fresh(self) -> _Done:
        """Before round 0."""
        state = self.engine.load(self.problem, *self.initial)
        nobody, none = np.zeros(self.problem.n_clients, bool), _Good(np.inf, 0, state, 0)
        done = self.further(_Done(state, 0, 0, 0, nobody, (), none), [0])
        if not np.isfinite(done.history[0]["gradient_mapping"]):
            instead = "" if self.double else ", or compute with precision='double'"
            raise InputError(
                f"x0: the loss or its gradient overflows there; start nearer to 0{instead}"
            )
        return done

    def resumed(self, resume: Result) -> _Done:
        """Where an earlier Result stopped; its last row goes if the full run would not have it."""
        _check_same_run(self, resume)
        server, clients = self.initial
        state = self.engine.load(
            self.problem,
            from_fields(server, resume.server, "server"),
            from_fields(clients, resume.clients, "client"),
        )
        history = resume.history.to_pylist()
        last, round = history[-1], resume.rounds
        if round % self.record_every and round != self.rounds:
            history.pop()
        seen = ~np.isin(self.problem.names, resume.never_present)
        good = _Good(last["gradient_mapping"], round, state, round)
        uploads, gradients = last["uploads"], last["gradient_evaluations"]
        return _Done(state, round, uploads, gradients, seen, tuple(history), good)

    def go(self, callback: Callable[[Progress], None] | None) -> Result:
        """All rounds to the end, the tolerance, or divergence."""
        tell = callback or (lambda _: None)
        tell(self.progress(self.done.history[-1]))
        while True:
            stop = self.stop_reason(self.done.history)
            if stop:
                return self.result(self.done, *stop)
            done, stops = self.advanced()
            for i, row in enumerate(done.history[-len(stops) : -1], 1):
                self.told = stops[:i]
                tell(self.progress(row))
            self.done, self.told = done, []
            tell(self.progress(done.history[-1]))

    def advanced(self) -> tuple[_Done, list[int]]:
        """Some rounds on, to the last recording that about `AHEAD` seconds bring, or to the first
        one that ends the run; and which recordings are new."""
        begin, since, stops = self.done.round, time.perf_counter(), self.stops()
        done = self.further(self.done, stops)
        self.pace = (done.round - begin) / (time.perf_counter() - since)
        for i in range(1, len(stops)):
            if self.stop_reason(done.history[: i - len(stops)]):
                return self.further(self.done, stops[:i]), stops[:i]
        return done, stops

    def stops(self) -> list[int]:
        """The next recordings."""
        every, round = self.record_every, self.done.round
        # the clock must not decide where several processes have to do the same
        one = self.diagnostics or not self.problem.in_memory or jax.process_count() > 1
        ahead = every if one else max(every, int(self.pace * AHEAD))
        last = min(self.rounds, round + ahead)
        stops = [*range((round // every + 1) * every, last + 1, every)]
        return stops if last < self.rounds or last in stops else [*stops, last]

    def further(self, done: _Done, stops: list[int]) -> _Done:
        """The rounds up to the last of `stops`, with a recording at each."""
        state, _, uploads, gradients, seen, history, good = done
        seen, rows = seen.copy(), []
        for begin, end in self.blocks(done.round, stops[-1]):
            cohorts = self.participation.cohorts(self.problem.n_clients, begin, end, self.seed)
            here, since = [stop for stop in stops if stop <= end][len(rows) :], state
            state, more, recordings = self.engine.advance(
                self.algorithm, self.problem, since, cohorts, begin, self.root, here
            )
            for stop, recording in zip(here, recordings, strict=True):
                t = stop - begin
                participants = int(cohorts.counts[t - 1]) if t else 0
                row = self.row(
                    recording, stop, uploads + int(cohorts.offsets[t]),
                    gradients + recording.gradients, participants,
                )  # fmt: skip
                rows.append(row)
                if row["gradient_mapping"] < good.mapping:
                    kept = (state, end) if stop == end else (since, begin)
                    good = _Good(row["gradient_mapping"], stop, *kept)
            uploads, gradients = uploads + len(cohorts.ids), gradients + more
            seen[cohorts.ids] = True
            if here and end > begin:
                rows[-1] |= self.diagnosis(since, state)
        return _Done(state, stops[-1], uploads, gradients, seen, (*history, *rows), good)

    def blocks(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The rounds in blocks of about `DRAWN` participants; for diagnostics the last one on its
        own."""
        size = max(1, int(DRAWN / max(1.0, self.presence)))
        edges = [*range(start, stop, size), stop]
        if self.diagnostics and stop - start > 1:
            edges = sorted({*edges, stop - 1})
        return [*itertools.pairwise(edges)] or [(start, stop)]

    def row(
        self, recording: Recording, round: int, uploads: int, gradients: int, participants: int
    ) -> dict[str, Any]:
        """A row of the history."""
        x, objective, mapping = recording.model, np.nan, np.inf
        if np.all(np.isfinite(x)):
            objective, mapping = evaluated(self.problem, x, recording.value, recording.grad)
        distance, distance_se = self.target.distances(x)
        return {
            "round": round,
            "participants": participants,
            "uploads": uploads,
            "bytes_up": uploads * self.bytes_up,
            "bytes_down": uploads * self.bytes_down,
            "gradient_evaluations": gradients,
            "objective": objective,
            "gradient_mapping": mapping,
            "distance": distance,
            "distance_se": distance_se,
        }

    def local_models(self, state: State) -> np.ndarray | None:
        """(N, d) the clients' own models, for diagnostics."""
        if not self.diagnostics:
            return None
        models = self.algorithm.local_models(self.engine.clients(self.problem, state))
        return None if models is None else np.asarray(models)

    def diagnosis(self, before: State, after: State) -> dict[str, float]:
        """How far the clients' models are from the server's and from what they were a round ago."""
        then, now = self.local_models(before), self.local_models(after)
        if then is None or now is None:
            return {}
        apart, moved = now - self.model(after)[None, :], now - then
        return {
            "local_distance": float(np.sqrt(np.mean(np.sum(apart**2, axis=1)))),
            "local_change": float(np.sqrt(np.mean(np.sum(moved**2, axis=1)))),
        }

    def stop_reason(self, history: Sequence[dict[str, Any]]) -> tuple[str, str] | None:
        """(status, message) if a run with this history is over."""
        mapping, round = history[-1]["gradient_mapping"], history[-1]["round"]
        if self.diverged(history):
            return "diverged", (
                f"diverged by round {round}: {self.algorithm.remedy()}; "
                f"the state of round {self.done.good.round} is kept"
            )
        if self.target.tol is not None and mapping <= self.target.tol:
            return "tolerance", f"gradient mapping {mapping:.3g} <= tol after {round} rounds"
        if round >= self.rounds:
            on = "" if self.double else "; double precision goes on from here"
            return "finished", f"{round} rounds done, gradient mapping {mapping:.3g}{on}"
        return None

    def diverged(self, history: Sequence[dict[str, Any]]) -> bool:
        if self.algorithm.recovers:
            return bool(np.isnan(history[-1]["objective"]))
        mapping = [row["gradient_mapping"] for row in history[-2:]]
        if not np.isfinite(mapping[-1]):
            return True
        return mapping[-1] > mapping[0] and mapping[-1] > GROWTH * self.scale

    @property
    def double(self) -> bool:
        """Whether rounds are computed in double precision."""
        return self.identity["precision"] == "double"

    @cached_property
    def root(self) -> jax.Array:
        return root_key(self.seed)

    @cached_property
    def scale(self) -> float:
        """The gradients to expect: mean norm of the clients' own at x0, even if they cancel."""
        norms = self.problem.sum_over_clients(_grad_norm, np.array(self.identity["x0"]))
        x0_size = 1.0 + float(np.linalg.norm(self.identity["x0"]))
        return max(
            float(norms) / self.problem.n_clients,
            self.done.history[0]["gradient_mapping"],
            1e-12 * self.setting.constants.L_F * x0_size,
        )

    @cached_property
    def presence(self) -> float:
        """Participants of a round to expect."""
        return float(np.sum(self.participation.inclusion(self.problem.n_clients)))

    def model(self, state: State) -> np.ndarray:
        return np.asarray(self.algorithm.model(state.server), float)

    def progress(self, row: dict[str, Any]) -> Progress:
        return Progress(
            row["round"], self.rounds, row["objective"], row["gradient_mapping"], row["distance"],
            self.interrupted,
        )  # fmt: skip

    @in_float64
    def interrupted(self) -> Result:
        """The run as far as the callback has been told."""
        done = self.further(self.done, self.told) if self.told else self.done
        message = f"interrupted after {done.round} rounds; resume= goes on"
        return self.result(done, "interrupted", message)

    def state_of(self, good: _Good) -> State:
        """The state of a recording."""
        _, round, since, start = good
        cohorts = self.participation.cohorts(self.problem.n_clients, start, round, self.seed)
        return self.engine.advance(
            self.algorithm, self.problem, since, cohorts, start, self.root
        ).state

    def result(self, done: _Done, status: str, message: str) -> Result:
        """The Result of the last state; of the best one after divergence."""
        state, round = done.state, done.round
        if status == "diverged":
            state, round = self.state_of(done.good), done.good.round
            warnings.warn(f"{self.algorithm.name} {message}", DivergenceWarning, stacklevel=4)
        x = self.model(state)
        clients = self.engine.clients(self.problem, state)
        names = zip(self.problem.names, done.seen, strict=True)
        never = [name for name, seen in names if not seen]
        return Result(
            x=x,
            algorithm=self.algorithm.name,
            hyperparameters=hyperparameters(self.algorithm),
            chosen=chosen(self.given, self.algorithm),
            exactness=self.algorithm.exactness(self.setting),
            rounds=round,
            status=status,
            message=message,
            history=pa.Table.from_pylist(list(done.history), schema=HISTORY),
            certificate=None if status == "interrupted" else certify(self.problem, x, absent=never),
            never_present=never,
            server=by_field(state.server),
            clients=by_field(clients),
            invariant=float(np.max(np.abs(self.algorithm.invariant(state.server, clients)))),
            run=self.identity,
        )


def check_kind(what: str, value: Any, kind: Any) -> None:
    """Raises InputError unless `value` is of the kind."""
    if not isinstance(value, kind):
        name = getattr(kind, "__name__", "Result")
        raise InputError(f"{what} must be a {name}, got {value!r}")


@summable
def _grad_norm(oracle: RowOracle, x: jax.Array) -> jax.Array:
    return jnp.linalg.norm(oracle.grad(x))


def setting_of(problem: Objective, participation: Participation, seed: int = 0) -> Setting:
    """What an algorithm may know before round 0."""
    return Setting(
        names=problem.names,
        dim=problem.dim,
        constants=problem.constants(),
        regularizer=problem.regularizer,
        participation=participation,
        seed=seed,
    )


def check_fit(problem: Objective, algorithm: Algorithm) -> None:
    """Raises CapabilityError where the algorithm cannot handle the problem."""
    if not isinstance(algorithm, Algorithm):
        raise InputError(f"algorithm must be one such as fx.FOCUS(), got {algorithm!r}")
    if not (algorithm.composite or isinstance(problem.regularizer, Zero)):
        raise CapabilityError(
            f"{algorithm.name} has no prox step for a regulariser, and the problem has "
            f"{problem.regularizer.describe()}: use FedDR, or l2= for a ridge"
        )


def evaluate(problem: Objective, x: np.ndarray) -> tuple[float, float]:
    """F(x) + g(x) and the norm of the gradient mapping with step 1/L_F, in one pass."""
    return evaluated(problem, x, *problem.value_and_grad(x))


def evaluated(
    problem: Objective, x: np.ndarray, value: float, grad: np.ndarray
) -> tuple[float, float]:
    """The same where F(x) and its (d,) gradient are known."""
    step = 1.0 / problem.constants().L_F
    moved = problem.prox(x - step * grad, step)
    return value + problem.penalty(x), float(np.linalg.norm(x - moved)) / step


def chosen(given: Algorithm, resolved: Algorithm) -> dict[str, Any]:
    """The hyperparameters that were left out, as chosen."""
    values, asked = hyperparameters(resolved), hyperparameters(given)
    return {k: v for k, v in values.items() if asked.get(k) is None and _is_number(v)}


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int | list) and not isinstance(value, bool)


def bytes_per_visit(
    algorithm: Algorithm, problem: Problem, server: Any, clients: Any, single: bool = False
) -> tuple[int, int]:
    """What one participant receives and sends in one round, without running it; in 4-byte numbers
    where `single`."""
    client = jax.tree.map(lambda a: a[0], clients)
    stack = part_for(algorithm, problem, np.zeros(1, int)).oracles
    pulled = jax.eval_shape(algorithm.pull, server, 0)

    def upload(client: Any, pulled: Any) -> Any:
        return algorithm.local(client, pulled, stack.client(0), root_key(0))[1]

    sent = jax.eval_shape(upload, client, pulled)
    again = algorithm.model(server) if algorithm.receives else ()
    return _bytes((pulled, again), single), _bytes(sent, single)


def _bytes(tree: Any, single: bool) -> int:
    widest = 4 if single else 8
    return sum(leaf.size * min(leaf.dtype.itemsize, widest) for leaf in jax.tree.leaves(tree))


def _check_same_run(run: _Run, resume: Result) -> None:
    """InputError where `resume` is of another run, naming what differs."""
    mine = {"algorithm": run.algorithm.name, **hyperparameters(run.algorithm), **run.identity}
    theirs = {"algorithm": resume.algorithm, **resume.hyperparameters}
    theirs |= {"precision": "double", **resume.run}  # which older files do not tell
    for key, value in mine.items():
        if value != theirs.get(key):
            raise InputError(
                f"resume: {key} is {value!r} here and {theirs.get(key)!r} in the saved result"
            )
    if resume.rounds > run.rounds:
        raise InputError(f"resume: {resume.rounds} rounds are done, more than rounds={run.rounds}")
    if resume.status == "diverged":
        raise InputError(f"resume: the saved run {resume.message}; start again with that change")
