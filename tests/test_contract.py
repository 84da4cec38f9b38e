"""What every algorithm of the registry owes: walk the registry, check each."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedexact as fx
from fedexact.core import Algorithm, client_key, root_key
from fedexact.engines import ENGINES
from fedexact.engines.state import initial, part_for
from fedexact.solve import setting_of
from problems import least_squares, programs

PROBLEM = least_squares(10)
REGISTRY = pytest.mark.parametrize("cls", fx.ALGORITHMS.values(), ids=fx.ALGORITHMS.keys())
ORACLE = {"value", "grad", "stochastic_grad", "prox", "hessian", "n_rows"}


def resolved(cls: type[Algorithm], **hyperparameters: float) -> Algorithm:
    return cls(**hyperparameters).resolve(setting_of(PROBLEM, fx.Bernoulli(0.5)))


def float_hyperparameters(algorithm: Algorithm) -> list[str]:
    fields = dataclasses.fields(algorithm)
    return [f.name for f in fields if isinstance(getattr(algorithm, f.name), float)]


@REGISTRY
def test_names_and_words(cls: type[Algorithm]) -> None:
    assert fx.ALGORITHMS[cls.name] is cls
    assert getattr(fx, cls.name) is cls
    assert cls.summary
    assert len(cls.summary) <= 80
    assert cls.reference
    assert cls.participation
    assert cls.rate
    assert cls.requires <= ORACLE
    assert cls.lower in {f.name for f in dataclasses.fields(cls)}
    assert cls.__module__.startswith("fedexact.algorithms.")


@REGISTRY
def test_the_file_reads_like_its_paper(cls: type[Algorithm]) -> None:
    """One algorithm per file, short, its equations on top."""
    text = Path(inspect.getfile(cls)).read_text()
    assert len(text.splitlines()) <= 125
    head = inspect.getdoc(inspect.getmodule(cls)) or ""
    assert "local" in head
    assert "push" in head
    algorithms = [c for c in fx.ALGORITHMS.values() if c.__module__ == cls.__module__]
    assert algorithms == [cls]


@REGISTRY
def test_every_hyperparameter_left_out_is_chosen(cls: type[Algorithm]) -> None:
    chosen = fx.solve(PROBLEM, cls(), rounds=1).chosen
    assert chosen
    for name, value in chosen.items():
        assert np.all(np.asarray(value) > 0) or (value == 0 and name.endswith("_seed")), name


@REGISTRY
@pytest.mark.parametrize("value", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_bad_hyperparameter_is_named(cls: type[Algorithm], value: float) -> None:
    for name in float_hyperparameters(resolved(cls)):
        with pytest.raises(fx.InputError, match=f"{cls.name}.*{name}"):
            cls(**{name: value})


@REGISTRY
def test_what_has_a_default_cannot_be_left_out(cls: type[Algorithm]) -> None:
    for field in dataclasses.fields(cls):
        if field.default is not None:
            with pytest.raises(fx.InputError, match=f"{cls.name} {field.name} must be given"):
                cls(**{field.name: None})


@REGISTRY
def test_hyperparameters_are_leaves_that_vmap_takes(cls: type[Algorithm]) -> None:
    """local and push over three values at once equal the three values one by one."""
    algorithm = resolved(cls)
    x0 = jnp.linspace(-1.0, 1.0, PROBLEM.dim)
    oracle = part_for(algorithm, PROBLEM).oracles.client(0)
    key = client_key(root_key(0), 0, 0)

    def visit(algorithm: Algorithm) -> jax.Array:
        server = algorithm.init_server(x0, 4)
        client = algorithm.init_client(x0 + 1.0)
        _, upload = algorithm.local(client, algorithm.pull(server, jnp.array(0)), oracle, key)
        return algorithm.model(algorithm.push(server, upload, jnp.array(1)))

    for name in float_hyperparameters(algorithm):
        values = getattr(algorithm, name) * np.array([0.5, 0.8, 1.0])
        at_once = jax.vmap(lambda v, n=name: visit(dataclasses.replace(algorithm, **{n: v})))(
            values
        )
        for value, x in zip(values, at_once, strict=True):
            one = visit(dataclasses.replace(algorithm, **{name: value}))
            np.testing.assert_allclose(x, one, rtol=1e-12, atol=1e-14)


@REGISTRY
def test_state_is_arrays_of_known_shape(cls: type[Algorithm]) -> None:
    algorithm = resolved(cls)
    server, clients = initial(algorithm, PROBLEM, jnp.zeros(PROBLEM.dim))
    for leaf in jax.tree.leaves((server, clients)):
        assert leaf.dtype == jnp.float64
    for leaf in jax.tree.leaves(clients):
        assert leaf.shape[0] == 4
    assert algorithm.model(server).shape == (PROBLEM.dim,)
    assert float(jnp.max(jnp.abs(algorithm.invariant(server, clients)))) == 0.0


@REGISTRY
def test_one_program_per_algorithm(cls: type[Algorithm]) -> None:
    fx.solve(PROBLEM, cls(), fx.Uniform(2), rounds=4, record_every=2)
    before = programs()
    fx.solve(PROBLEM, cls(), fx.Bernoulli(0.4), rounds=6, record_every=2, seed=5)
    assert programs() == before


@REGISTRY
@pytest.mark.parametrize("engine", ENGINES)
def test_stopped_saved_resumed_is_the_same_bit_for_bit(
    cls: type[Algorithm], engine: str, tmp_path: Path
) -> None:
    def run(rounds: int, resume: fx.Result | None = None) -> fx.Result:
        return fx.solve(
            PROBLEM, cls(), fx.Bernoulli(0.4), rounds=rounds, engine=engine,
            record_every=10, seed=3, resume=resume,
        )  # fmt: skip

    whole = run(37)
    part = run(13)
    part.save(tmp_path / "part.npz")
    again = run(37, fx.Result.load(tmp_path / "part.npz"))
    assert np.array_equal(whole.x, again.x)
    for side in ("server", "clients"):
        for field, array in getattr(whole, side).items():
            assert np.array_equal(array, getattr(again, side)[field]), field
    assert whole.history.equals(again.history)
    assert whole.certificate is not None
    assert again.certificate is not None
    assert whole.certificate.to_dict() == again.certificate.to_dict()


@REGISTRY
def test_the_invariant_holds_under_random_participation(cls: type[Algorithm]) -> None:
    result = fx.solve(PROBLEM, cls(), fx.Bernoulli([0.9, 0.6, 0.4, 0.1]), rounds=200, seed=1)
    assert result.invariant <= 1e-12 * max(1.0, float(np.max(np.abs(result.x))))


@REGISTRY
def test_exactness_is_kept_as_promised(cls: type[Algorithm]) -> None:
    """With everybody present: exact ones land on the pooled answer, biased ones do not."""
    result = fx.solve(PROBLEM, cls(), rounds=3000)
    distance = np.linalg.norm(result.x - fx.reference(PROBLEM))
    assert result.certificate is not None
    if result.exactness.exact:
        assert distance < 1e-10
        assert result.certificate.verdict == "certified"
    else:
        assert distance > 1e-4
        assert result.certificate.verdict == "not certified"


@REGISTRY
def test_the_assumptions_are_said(cls: type[Algorithm]) -> None:
    """A client that never comes back violates one of them, whatever the algorithm."""
    for p, met in ((0.5, True), ([1.0, 1.0, 0.0, 1.0], False)):
        setting = setting_of(PROBLEM, fx.Bernoulli(p))
        assumed = dict(cls().resolve(setting).assumptions(setting))
        assert assumed["every client keeps coming back"] is met


@REGISTRY
def test_a_client_never_present_is_named(cls: type[Algorithm]) -> None:
    result = fx.solve(PROBLEM, cls(), fx.Bernoulli([1.0, 1.0, 0.0, 1.0]), rounds=50)
    assert result.never_present == ["2"]
    assert not result.exactness.exact
    assert result.certificate is not None
    assert result.certificate.verdict != "certified"
    assert "2" in result.certificate.reason
