"""The server against everything that sites, carriers, disks and people do to it."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

pytest.importorskip("cryptography")

import fedexact as fx
from federation import NONE, Carrier, Faults, Federation, Watched, passing
from fedexact import config
from fedexact.core import float64
from fedexact.deploy import roster, store
from fedexact.deploy.coordinator import run_federation
from fedexact.deploy.messages import Content
from fedexact.deploy.remote import FederationError
from fedexact.deploy.roster import Clock
from fedexact.deploy.rounds import Rounds
from fedexact.deploy.session import open_session
from fedexact.deploy.site import Site, SiteConfig
from fedexact.errors import InputError
from fedexact.losses import Multinomial
from fedexact.solve import setting_of
from problems import fast_only, random_targets

FOCUS = {"name": "FOCUS"}
ENOUGH = 70  # rounds of FOCUS on the small problem
CLOSE = 1e-9


def rows(loss: str = "squared", N: int = 3, n: int = 40, d: int = 2) -> list[tuple[Any, Any]]:
    """Clients of the same size, so that one program serves all."""
    rng = np.random.default_rng(5)
    found = []
    for k in range(N):
        X = rng.normal(size=(n, d)) + 0.2 * (k % 3)
        eta = 0.4 + X @ np.linspace(0.7, -0.5, d)
        found.append((X, random_targets(loss, eta, rng)))
    return found


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.of(rows(), "squared", tmp_path)


class Scripted(Carrier):
    """Loses what `lost` says, and is told of each round before it begins."""

    lost: Callable[[str, Content], bool] = staticmethod(lambda name, content: False)
    before: Callable[[int], None] = staticmethod(lambda round: None)

    def send(self, batch: Sequence[tuple[int, Content]]) -> list[str]:
        if batch and batch[0][1].kind == "train":
            self.before(int(batch[0][1].meta["round"]))
        return super().send(batch)

    def deliver(self, id: str, node: int, content: Content, faults: Faults) -> None:
        if not self.lost(self.configs[node].client, content):
            super().deliver(id, node, content, faults)


def carrier_of(federation: Federation) -> Scripted:
    return Scripted(federation.configs())


def reports(federation: Federation, out: str = "out") -> list[dict[str, Any]]:
    lines = (federation.folder / out / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def is_exact(federation: Federation, result: fx.Result) -> bool:
    return bool(np.abs(result.x - fx.reference(federation.problem())).max() < CLOSE)


def asked(
    federation: Federation,
    algorithm: Mapping[str, Any] = FOCUS,
    rounds: int = ENOUGH,
    problem: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    **deploy: Any,
) -> config.Experiment:
    """An experiment with other settings than `Federation.experiment` has."""
    return config.parse(
        {
            "rounds": rounds,
            "data": {"sites": "rows", "target": "y", **(data or {})},
            "problem": {"loss": federation.loss, "fit_intercept": True, **(problem or {})},
            "algorithms": [dict(algorithm)],
            "deploy": {"clients": federation.names, "deadline": 5.0, "wait": 60.0, **deploy},
        }
    )


# --- replies that cannot be counted ---------------------------------------------------------------


class Untouchable(np.ndarray):
    """An array whose values nobody may look at."""

    def __array_ufunc__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("its values were read")

    def __array_function__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("its values were read")


def arrays(content: Content, **changes: Any) -> Content:
    changed = {name.replace("__", "/"): array for name, array in changes.items()}
    return content._replace(arrays={**content.arrays, **changed})


def meta(content: Content, **changes: Any) -> Content:
    return content._replace(meta={**content.meta, **changes})


def upload_name(content: Content) -> str:
    return next(name for name in content.arrays if name.startswith("upload/"))


def with_upload(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Content], Content]:
    def altered(content: Content) -> Content:
        name = upload_name(content)
        return content._replace(arrays={**content.arrays, name: change(content.arrays[name])})

    return altered


def one_value(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = np.array(array)
        array.flat[-1] = value
        return array

    return change


TEN_GB = 10 * 2**30 // 8
BAD: dict[str, tuple[Callable[[Content], Content], str, str]] = {
    "NaN": (with_upload(one_value(np.nan)), "not finite", "upload"),
    "inf": (with_upload(one_value(np.inf)), "not finite", "upload"),
    "NaN gradient": (lambda c: arrays(c, grad=c.arrays["grad"] * np.nan), "not finite", "grad"),
    "shape": (with_upload(lambda a: a[:-1]), "malformed", "(2,), expected float64 (3,)"),
    "broadcasts": (with_upload(lambda a: a[:1]), "malformed", "(1,), expected float64 (3,)"),
    "more axes": (with_upload(lambda a: a[None]), "malformed", "(1, 3)"),
    "float32": (with_upload(lambda a: a.astype(np.float32)), "malformed", "float32"),
    "integers": (with_upload(lambda a: a.astype(np.int64)), "malformed", "int64"),
    "objects": (with_upload(lambda a: a.astype(object)), "malformed", "object"),
    "complex": (with_upload(lambda a: a.astype(complex)), "malformed", "complex128"),
    "missing": (
        lambda c: c._replace(arrays={n: a for n, a in c.arrays.items() if n != "grad"}),
        "malformed",
        "expected grad",
    ),
    "extra": (lambda c: arrays(c, extra=np.zeros(3)), "malformed", "extra"),
    "nothing": (lambda c: c._replace(arrays={}), "malformed", "sends nothing"),
    "round": (lambda c: meta(c, round=c.meta["round"] - 1), "round", "the reply is of round"),
    "epoch": (lambda c: meta(c, epoch=1), "round", "(epoch 1)"),
    "no round": (lambda c: c._replace(meta={"client": "site 1"}), "round", "of round None"),
    "no visit": (lambda c: meta(c, visit=None), "malformed", "visit"),
    "foreign": (lambda c: meta(c, client="site 2"), "client-id", "answers as 'site 2'"),
    "nobody": (lambda c: c._replace(meta={}), "client-id", "answers as None"),
    "kind": (lambda c: c._replace(kind="query"), "malformed", "answers 'query'"),
    "10 GB": (
        with_upload(lambda a: np.broadcast_to(0.0, (TEN_GB,)).view(Untouchable)),
        "malformed",
        f"({TEN_GB},)",
    ),
    "masked": (
        lambda c: c._replace(arrays={"masked": np.zeros((9, 4), np.uint64)}),
        "malformed",
        "masked",
    ),
}


@pytest.fixture(scope="module")
def plain_answer(tmp_path_factory: pytest.TempPathFactory) -> fx.Result:
    """The run of the small problem without faults."""
    federation = Federation.of(rows(), "squared", tmp_path_factory.mktemp("plain"))
    with float64():
        return federation.run(asked(federation), carrier_of(federation))


def test_without_faults_the_answer_is_the_pooled_one(
    federation: Federation, plain_answer: fx.Result
) -> None:
    assert is_exact(federation, plain_answer)
    assert plain_answer.certificate is not None
    assert plain_answer.certificate.verdict == "certified"


def test_bad_replies_are_refused_by_name_and_the_rounds_go_on(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier, watched = carrier_of(federation), Watched(monkeypatch, federation.configs())
    cases = dict(enumerate(BAD.values(), 3))

    def alter(name: str, content: Content) -> Content:
        case = cases.get(int(content.meta.get("round", -1)))
        return case[0](content) if case and name == "site 1" else content

    carrier.alter = alter
    said: list[str] = []
    result = federation.run(asked(federation, rounds=ENOUGH + 25), carrier, said)
    for report in reports(federation):
        case = cases.get(report["round"])
        if case is None:
            assert report["failed"] == {}
            continue
        assert report["counted"] == ["site 0", "site 2"]
        failed = report["failed"]["site 1"]
        assert failed["code"] == case[1]
        assert "'site 1'" in failed["reason"]
        assert case[2] in failed["reason"]
        line = next(line for line in said if f"round {report['round']}:" in line)
        assert failed["reason"] in line
        assert "2 of 3 clients" in line
    assert watched.worst < 1e-12
    assert is_exact(federation, result)


def test_a_reply_of_ten_gigabytes_on_a_disk_is_refused_by_its_shape(
    federation: Federation, tmp_path: Path
) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(8 * TEN_GB)
    huge = np.memmap(path, np.float64, "r", shape=(TEN_GB,))
    carrier = carrier_of(federation)
    carrier.alter = lambda name, c: arrays(c, grad=huge) if "round" in c.meta else c
    federation.run(asked(federation, rounds=2), carrier)
    assert all(len(report["failed"]) == 3 for report in reports(federation))
    assert reports(federation)[0]["bytes_up"] > 3e10
    assert path.stat().st_blocks * 512 < 2**20


QUERIES = {
    "NaN": lambda c: arrays(c, **{"0__0": np.full_like(c.arrays["0/0"], np.nan)}),
    "broadcasts": lambda c: arrays(c, **{"0__0": np.zeros((1, *c.arrays["0/0"].shape))}),
    "missing": lambda c: c._replace(arrays={}),
    "extra": lambda c: arrays(c, **{"99__0": np.zeros(3)}),
    "no number": lambda c: arrays(c, a__b=np.zeros(3)),
    "huge": lambda c: arrays(
        c, **{"0__0": np.broadcast_to(0.0, (TEN_GB,)).view(Untouchable)}
    ),
    "foreign": lambda c: meta(c, client="site 0"),
}  # fmt: skip


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("case", QUERIES)
def test_a_bad_reply_in_the_last_pass_makes_no_wrong_certificate(
    case: str, secure: bool, federation: Federation, plain_answer: fx.Result
) -> None:
    if secure and case not in ("missing", "foreign"):
        return  # what is masked has one form
    carrier, bad = carrier_of(federation), [2]

    def alter(name: str, content: Content) -> Content:
        over = any(c.kind == "train" for _, c in carrier.requests)
        if content.kind == "query" and name == "site 1" and over and bad[0]:
            bad[0] -= 1
            return QUERIES[case](content)
        return content

    carrier.alter = alter
    there = federation.run(asked(federation, rounds=2, secure=secure), carrier)
    assert there.certificate is not None
    bad[0] = 10**9
    said: list[str] = []
    carrier.requests.clear()
    asks = asked(federation, rounds=3, secure=secure, wait=2.0)
    result = federation.run(asks, carrier, said, resume=True)
    assert result.certificate is None
    assert "'site 1'" in result.message
    assert not any("all 3 clients answered" in line for line in said)


# --- who is who -----------------------------------------------------------------------------------


def twin(federation: Federation, k: int, folder: Path) -> SiteConfig:
    """Another node with the client-id and the rows of client k, and a state folder of its own."""
    return federation.configs()[k]._replace(state=folder)


def test_a_node_that_is_no_member_is_refused_by_name(federation: Federation) -> None:
    stranger = federation.configs()[0]._replace(client="é/9", state=federation.folder / "other")
    carrier = Scripted([*federation.configs(), stranger])
    said: list[str] = []
    result = federation.run(asked(federation, rounds=3), carrier, said)
    assert any("node 3 refused: 'é/9' is no member" in line for line in said)
    assert result.rounds == 3
    assert {name for name, content in carrier.requests if content.kind == "train"} == {
        "site 0", "site 1", "site 2",
    }  # fmt: skip


def test_the_second_of_two_nodes_with_one_client_id_waits_for_the_first(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier = Scripted([*federation.configs(), twin(federation, 1, federation.folder / "twin")])
    watched, said = Watched(monkeypatch, federation.configs()), list[str]()

    def before(round: int) -> None:
        if round == 8:
            carrier.listed.discard(1)

    carrier.before = before
    carrier.lost = lambda name, content: False
    visits: list[tuple[int, int]] = []
    visit = Carrier.visit

    def seen(self: Carrier, node: int, content: Content, faults: Faults) -> Any:
        if content.kind == "train":
            visits.append((content.meta["round"], node))
        return visit(self, node, content, faults)

    monkeypatch.setattr(Carrier, "visit", seen)
    monkeypatch.setattr("federation.states", lambda *args: (_ for _ in ()).throw(
        store.DamagedRecordError))  # fmt: skip
    result = federation.run(asked(federation, rounds=ENOUGH + 10), carrier, said)
    refused = [line for line in said if line.startswith("node 3 refused")]
    assert len(refused) == 1
    assert "another node speaks for client 'site 1'" in refused[0]
    who = {round: node for round, node in visits if node in (1, 3)}
    assert {who[r] for r in range(9)} == {1}
    assert {who[r] for r in range(9, ENOUGH + 10)} == {3}
    notes = [report.note for report in watched.reports if report.note]
    assert len(notes) == 1
    assert "restarted from here: client 'site 1' holds nothing" in notes[0]
    assert is_exact(federation, result)


def test_a_node_that_restarts_with_its_state_folder_takes_over(federation: Federation) -> None:
    carrier = Scripted([*federation.configs(), federation.configs()[1]])
    carrier.listed = {0, 1, 2}

    def before(round: int) -> None:
        if round == 8:
            carrier.listed.add(3)  # the old node is still listed

    carrier.before = before
    carrier.lost = lambda name, content: False
    deliver, nodes = carrier.deliver, []

    def deliver_(id: str, node: int, content: Content, faults: Faults) -> None:
        if content.kind == "train":
            nodes.append(node)
        if not (node == 1 and content.meta.get("round", 0) > 8):
            deliver(id, node, content, faults)

    carrier.deliver = deliver_
    result = federation.run(asked(federation), carrier)
    assert all(report["failed"] == {} for report in reports(federation))
    assert nodes.count(3) == ENOUGH - 9
    assert is_exact(federation, result)


def test_two_sites_with_one_state_folder_are_told_apart(federation: Federation) -> None:
    first, second, third = federation.configs()
    carrier = Scripted([first, second._replace(state=first.state), third])
    said: list[str] = []
    with pytest.raises(FederationError, match=r"no node spoke for site 1 within 60 s") as failed:
        federation.run(asked(federation), carrier, said)
    reason = "the state folder of client 'site 1' is that of 'site 0'"
    assert reason in str(failed.value)
    assert any(reason in line for line in said)


def at_times(events: Mapping[float, Callable[[], None]]) -> Clock:
    """A clock at which things happen."""
    clock, left = passing(), dict(events)

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        for time in [t for t in left if t <= clock.now()]:
            left.pop(time)()

    return Clock(clock.now, sleep)


def test_a_node_that_comes_late_is_waited_for(federation: Federation) -> None:
    carrier = carrier_of(federation)
    carrier.listed = {0, 2}
    clock = at_times({50.0: lambda: carrier.listed.add(1)})
    result = federation.run(asked(federation), carrier, clock=clock)
    assert is_exact(federation, result)


def test_a_member_that_never_comes_is_named(federation: Federation) -> None:
    carrier = carrier_of(federation)
    carrier.listed = {0, 2}
    with pytest.raises(FederationError, match="no node spoke for site 1 within 60 s"):
        federation.run(asked(federation), carrier)


def test_a_node_that_does_not_say_hello_is_asked_again_now_and_then(
    federation: Federation,
) -> None:
    carrier = carrier_of(federation)
    asks: list[str] = []

    def lost(name: str, content: Content) -> bool:
        if content.kind == "hello" and name == "site 1":
            asks.append(name)
            return len(asks) < 3
        return False

    carrier.lost = lost
    federation.run(asked(federation, rounds=2, wait=600.0), carrier)
    assert len(asks) == 3


@pytest.mark.parametrize("version", ["0.0.1", None])
def test_other_versions_are_refused(version: str | None, federation: Federation) -> None:
    carrier = carrier_of(federation)
    carrier.alter = lambda name, c: (
        meta(c, version=version) if (name, c.kind) == ("site 2", "hello") else c
    )
    with pytest.raises(FederationError, match=rf"'site 2' runs fedexact {version}, the server"):
        federation.run(asked(federation), carrier)


def test_a_hello_without_a_description_is_refused_by_name(federation: Federation) -> None:
    carrier = carrier_of(federation)

    def alter(name: str, content: Content) -> Content:
        if (name, content.kind) != ("site 2", "hello"):
            return content
        return content._replace(
            meta={key: v for key, v in content.meta.items() if key != "description"}
        )

    carrier.alter = alter
    with pytest.raises(InputError, match="description of client 'site 2'"):
        federation.run(asked(federation), carrier)


ODD = ["VA Long Beach/1", "é", "../../etc", 'O\'Hare "B"', "a\nb", "0", " "]


@pytest.mark.parametrize("secure", [False, True])
def test_names_may_have_any_characters(secure: bool, tmp_path: Path) -> None:
    federation = Federation.of(rows(N=len(ODD)), "squared", tmp_path / "f", ODD)
    carrier = carrier_of(federation)
    carrier.lost = lambda name, c: name == 'O\'Hare "B"' and c.meta.get("round") == 2
    result = federation.run(asked(federation, rounds=ENOUGH, secure=secure), carrier)
    assert reports(federation)[2]["failed"].keys() == {'O\'Hare "B"'}
    assert is_exact(federation, result)
    assert {path.name for path in tmp_path.iterdir()} == {"f"}


@pytest.mark.slow
def test_two_hundred_members(tmp_path: Path) -> None:
    federation = Federation.of(rows(N=200, n=10), "squared", tmp_path)
    carrier = carrier_of(federation)
    result = federation.run(asked(federation, {"name": "PushNewton"}, rounds=3), carrier)
    assert result.certificate is not None
    assert result.certificate.verdict == "certified"
    assert is_exact(federation, result)


# --- rounds that do not count ---------------------------------------------------------------------


def test_a_round_below_the_quorum_is_not_counted(federation: Federation) -> None:
    carrier = carrier_of(federation)
    carrier.lost = lambda name, c: name == "site 2" and 3 <= c.meta.get("round", 0) < 9
    said: list[str] = []
    result = federation.run(asked(federation, quorum=3), carrier, said)
    found = reports(federation)
    for report in found[3:9]:
        assert report["counted"] == []
        assert report["note"] == "2 uploads, the quorum is 3"
        assert report["failed"]["site 2"]["code"] == "late"
    assert result.history["uploads"].to_pylist()[8] == 9
    assert sum("the quorum is 3" in line for line in said) == 6
    assert is_exact(federation, result)


def test_a_silent_site_costs_the_deadline_and_no_more(federation: Federation) -> None:
    carrier = carrier_of(federation)
    carrier.lost = lambda name, c: name == "site 0" and c.meta.get("round") in (4, 5)
    result = federation.run(asked(federation, deadline=7.0), carrier)
    seconds = [report["seconds"] for report in reports(federation)]
    assert seconds[4] == pytest.approx(7.0, abs=0.5)
    assert seconds[6] == 0.0
    assert reports(federation)[4]["failed"]["site 0"] == {
        "code": "late", "reason": "client 'site 0': no reply within 7 s",
    }  # fmt: skip
    assert is_exact(federation, result)


def test_late_replies_are_dropped_and_counted_as_late(federation: Federation) -> None:
    carrier, held = carrier_of(federation), list[Any]()
    receive = carrier.receive

    def delayed(ids: Any) -> Any:
        found = receive(ids)
        slow = [
            r for r in found
            if isinstance(r.content, Content) and r.node == 1 and r.content.meta.get("round") == 4
        ]  # fmt: skip
        held.extend(slow)
        return [r for r in found if r not in slow]

    carrier.receive = delayed
    carrier.before = lambda round: carrier.replies.extend(
        [r._replace(content=meta(r.content, round=99)) for r in held] if round == 5 else []
    )
    result = federation.run(asked(federation), carrier)
    found = reports(federation)
    assert found[4]["failed"]["site 1"]["code"] == "late"
    assert found[5]["late"] == 1
    assert found[5]["counted"] == federation.names
    assert is_exact(federation, result)


def test_rounds_to_which_nobody_is_invited_change_nothing(federation: Federation) -> None:
    carrier = carrier_of(federation)
    pattern = {"name": "bernoulli", "p": 0.3}
    result = federation.run(asked(federation, rounds=20, participation=pattern), carrier)
    empty = [report for report in reports(federation) if not report["invited"]]
    assert empty
    assert all(r["note"] == "nobody was invited" and r["bytes_down"] == 0 for r in empty)
    counts = [len(report["counted"]) for report in reports(federation)]
    assert result.history["participants"].to_pylist() == counts
    assert result.history["uploads"].to_pylist() == np.cumsum(counts).tolist()


def test_nobody_answers_for_many_rounds(federation: Federation) -> None:
    carrier = carrier_of(federation)
    carrier.lost = lambda name, c: 5 <= c.meta.get("round", 0) < 45
    result = federation.run(asked(federation, rounds=ENOUGH + 40), carrier)
    found = reports(federation)
    assert all(report["note"] == "no upload" for report in found[5:45])
    assert found[45]["counted"] == federation.names
    assert is_exact(federation, result)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FOCUS", "FedAWE"])
def test_a_client_that_is_away_for_a_hundred_rounds_goes_on(
    name: str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier, watched = carrier_of(federation), Watched(monkeypatch, federation.configs())
    carrier.lost = lambda name, c: name == "site 2" and 5 <= c.meta.get("round", 0) < 105
    result = federation.run(asked(federation, {"name": name}, rounds=170), carrier)
    assert all(not report["note"] for report in reports(federation))
    assert reports(federation)[105]["counted"] == federation.names
    assert watched.worst < 1e-12
    assert name != "FOCUS" or is_exact(federation, result)


def test_a_client_that_never_takes_part_is_named_and_not_certified(
    federation: Federation,
) -> None:
    carrier = carrier_of(federation)
    carrier.lost = lambda name, c: name == "site 2" and c.kind == "train"
    result = federation.run(asked(federation), carrier)
    assert result.never_present == ["site 2"]
    assert result.certificate is not None
    assert result.certificate.verdict != "certified"
    assert result.certificate.absent == ("site 2",)


# --- states that are lost, rows that change -------------------------------------------------------


def lose(federation: Federation, k: int) -> None:
    shutil.rmtree(federation.folder / "states" / f"site {k}")


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("name", ["FOCUS", "FedSplit"])
def test_a_lost_state_folder_restarts_the_federation(
    name: str, secure: bool, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier, watched = carrier_of(federation), Watched(monkeypatch, federation.configs())

    def before(round: int) -> None:
        if round == 10:
            for path in (federation.folder / "states" / "site 1").rglob("*.state"):
                path.unlink()

    carrier.before = before
    rounds = ENOUGH + 10 if name == "FOCUS" else 150
    asks = asked(federation, {"name": name}, rounds=rounds, secure=secure)
    result = federation.run(asks, carrier)
    noted = [report for report in reports(federation) if report["note"]]
    assert [report["round"] for report in noted] == [10]
    assert "restarted from here: client 'site 1' holds nothing" in noted[0]["note"]
    assert "counted round 9" in noted[0]["note"]
    assert watched.worst < 1e-12
    assert is_exact(federation, result)


@pytest.mark.parametrize("secure", [False, True])
def test_a_lost_state_can_be_refused_instead(secure: bool, federation: Federation) -> None:
    carrier = carrier_of(federation)

    def before(round: int) -> None:
        if round == 10:  # the key and the identity stay: masks need them
            for path in (federation.folder / "states" / "site 1").rglob("*.state"):
                path.unlink()

    carrier.before = before
    said: list[str] = []
    asks = asked(federation, rounds=40, lost="refuse", secure=secure)
    result = federation.run(asks, carrier, said)
    for report in reports(federation)[10:]:
        assert report["counted"] == ["site 0", "site 2"]
        assert report["failed"]["site 1"]["code"] == "lost"
        assert report["note"] == ""
    assert sum("'site 1' holds nothing" in line for line in said) == 30
    assert result.certificate is not None
    assert result.certificate.verdict == "not certified"


@pytest.mark.parametrize("which", ["target", "feature", "row"])
def test_rows_that_change_during_a_run_are_refused_by_name(
    which: str, federation: Federation
) -> None:
    carrier = carrier_of(federation)

    def before(round: int) -> None:
        if round != 5:
            return
        X, y = (np.array(a) for a in federation.rows[1])
        if which == "target":
            y[3] += 1e-9
        elif which == "feature":
            X[3, 0] += 1e-9
        else:
            X, y = np.concatenate([X, X[:1]]), np.concatenate([y, y[:1]])
        pq.write_table(pa.table({"x0": X[:, 0], "x1": X[:, 1], "y": y}), federation.file(1))
        carrier.sites[1] = Site(federation.configs()[1])

    carrier.before = before
    federation.run(asked(federation, rounds=8, wait=1.0), carrier)
    for report in reports(federation)[5:]:
        assert report["failed"]["site 1"]["code"] == "data"
        assert "client 'site 1': its rows have changed" in report["failed"]["site 1"]["reason"]
        assert report["counted"] == ["site 0", "site 2"]


def test_another_number_of_rows_is_refused_even_with_a_new_state_folder(
    federation: Federation,
) -> None:
    """Weights count rows: with others the answer would not be the pooled one."""
    carrier = carrier_of(federation)

    def before(round: int) -> None:
        if round == 5:
            lose(federation, 1)
            table = pq.read_table(federation.file(1))
            pq.write_table(pa.concat_tables([table, table]), federation.file(1))
            carrier.sites[1] = Site(federation.configs()[1])

    carrier.before = before
    result = federation.run(asked(federation, rounds=8, wait=1.0), carrier)
    assert all(r["failed"]["site 1"]["code"] == "data" for r in reports(federation)[5:])
    assert result.certificate is None


# --- checkpoints ----------------------------------------------------------------------------------


def checkpoint(federation: Federation, out: str = "out") -> Path:
    return federation.folder / out / "01-FOCUS" / "checkpoint.record"


def test_a_run_is_resumed_with_more_rounds_and_none(
    federation: Federation, plain_answer: fx.Result
) -> None:
    carrier, said = carrier_of(federation), list[str]()
    federation.run(asked(federation, rounds=30), carrier, said)
    there = federation.run(asked(federation), carrier, said, resume=True)
    assert "FOCUS: goes on from round 30" in said
    assert there.rounds == ENOUGH
    assert there.x.tobytes() == plain_answer.x.tobytes()
    assert there.history.num_rows == ENOUGH
    sent = len(carrier.requests)
    again = federation.run(asked(federation), carrier, said, resume=True)
    assert again.x.tobytes() == there.x.tobytes()
    assert again.rounds == ENOUGH
    assert again.certificate is not None
    assert not [c for _, c in carrier.requests[sent:] if c.kind == "train"]


def test_without_resume_the_run_starts_afresh(federation: Federation) -> None:
    carrier = carrier_of(federation)
    federation.run(asked(federation, rounds=4), carrier)
    result = federation.run(asked(federation, rounds=3), carrier, resume=False)
    assert result.rounds == 3
    assert [report["round"] for report in reports(federation)] == [0, 1, 2, 3, 0, 1, 2]


def test_a_torn_checkpoint_is_refused(federation: Federation) -> None:
    carrier = carrier_of(federation)
    federation.run(asked(federation, rounds=4), carrier)
    path = checkpoint(federation)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"checkpoint\.record is damaged.*start afresh"):
        federation.run(asked(federation, rounds=5), carrier, resume=True)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "algorithm": ({"algorithm": {"name": "FOCUS", "lr": 0.01}}, "algorithm"),
    "participation": ({"participation": {"name": "uniform", "m": 2}}, "participation"),
    "l2": ({"problem": {"l2": 0.1}}, "target"),
    "a little l2": ({"problem": {"l2": 1e-12}}, "target"),
    "weights": ({"problem": {"weights": [1.0, 2.0, 3.0]}}, "weights"),
    "columns": ({"data": {"features": ["x0"]}}, "columns"),
    "standardize": ({"data": {"standardize": True}}, "columns and moments"),
    "members": ({"clients": ["site 0", "site 1"]}, "clients"),
    "order": ({"clients": ["site 1", "site 0", "site 2"]}, "clients"),
}


def test_a_checkpoint_of_another_experiment_is_refused(federation: Federation) -> None:
    carrier = carrier_of(federation)
    federation.run(asked(federation, rounds=3), carrier)
    for changes, what in OTHERS.values():
        with pytest.raises(InputError, match=rf"is of another run: .*{what}"):
            federation.run(asked(federation, rounds=4, **changes), carrier, resume=True)


def test_other_rows_are_another_run(federation: Federation) -> None:
    carrier = carrier_of(federation)
    federation.run(asked(federation, rounds=3), carrier)
    table = pq.read_table(federation.file(1))
    pq.write_table(table.slice(1), federation.file(1))
    with pytest.raises(InputError, match=r"is of another run: .*rows"):
        federation.run(asked(federation, rounds=4), carrier_of(federation), resume=True)


def test_given_weights_are_part_of_the_run(federation: Federation) -> None:
    carrier = carrier_of(federation)
    first, second = ({"weights": w} for w in ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]))
    federation.run(asked(federation, rounds=3, problem=first), carrier)
    with pytest.raises(InputError, match="weights"):
        federation.run(asked(federation, rounds=4, problem=second), carrier, resume=True)


@pytest.mark.parametrize("what", ["checkpoint.record", "rounds.jsonl"])
def test_a_full_disk_of_the_server_stops_the_run_and_loses_nothing(
    what: str, federation: Federation, monkeypatch: pytest.MonkeyPatch, plain_answer: fx.Result
) -> None:
    carrier, written = carrier_of(federation), [0]
    opened = Path.open

    def full(self: Path, *args: Any, **kwargs: Any) -> Any:
        mode = kwargs.get("mode", args[0] if args else "r")
        if self.name.startswith(("." + what.split(".")[0], what)) and mode[0] in "wa":
            written[0] += 1
            if written[0] == 12:
                raise OSError(28, "No space left on device")
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(FederationError, match=r"cannot be written \(No space left on device\)"):
        federation.run(asked(federation), carrier)
    result = federation.run(asked(federation), carrier, resume=True)
    assert result.x.tobytes() == plain_answer.x.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FOCUS", "FedSplit", "FedAWE"])
@pytest.mark.parametrize("participation", ["full", "partial"])
def test_an_older_checkpoint_ends_exact(
    name: str, participation: str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier = Scripted(federation.configs(), Faults(lost_reply=0.3), seed=4)
    watched = Watched(monkeypatch, federation.configs())
    pattern = {"name": "bernoulli", "p": [0.9, 0.5, 0.2]}
    settings = {"participation": pattern} if participation == "partial" else {}

    def run(rounds: int) -> fx.Result:
        asks = asked(federation, {"name": name}, rounds=rounds, **settings)
        return federation.run(asks, carrier, resume=True)

    run(20)
    folder = federation.folder / "out" / f"01-{name}"
    shutil.copytree(folder, federation.folder / "backup")
    run(40)
    for path in (federation.folder / "backup").iterdir():
        shutil.copy(path, folder / path.name)
    assert carrier.exchanges > 30
    result = run(60)
    notes = [report.note for report in watched.reports if "restarted" in report.note]
    assert notes
    assert watched.worst < 1e-12
    carrier.faults = NONE
    result = run(500 if participation == "partial" else 250)
    assert watched.worst < 1e-12
    if name != "FedAWE":
        assert is_exact(federation, result)


def rounds_of(federation: Federation, carrier: Carrier, out: str) -> Rounds:
    """One server, stepped by hand."""
    experiment = asked(federation).deployed()
    session = open_session(carrier, experiment, lambda line: None, passing())
    participation = experiment.build_participation(session.objective)
    given = experiment.build_algorithms()["FOCUS"]
    setting = setting_of(session.objective, participation, 0)
    folder = federation.folder / out / "01-FOCUS"
    rounds = Rounds(
        session,
        given,
        given.resolve(setting),
        participation,
        folder,
        0,
        np.zeros(session.objective.dim),
    )
    rounds.resume()
    return rounds


def test_two_servers_at_once_are_never_silently_wrong(federation: Federation) -> None:
    """Both go on from one checkpoint and number their rounds alike."""
    carrier = carrier_of(federation)
    federation.run(asked(federation, rounds=10), carrier)
    shutil.copytree(federation.folder / "out", federation.folder / "second")
    servers = [rounds_of(federation, carrier, out) for out in ("out", "second")]
    heard = [["site 1", "site 2"], ["site 0", "site 1"]]
    notes: list[str] = []
    for _ in range(6):
        for server, names in zip(servers, heard, strict=True):
            carrier.lost = lambda name, c, names=names: name not in names
            notes.append(server.step().note)
    assert any("restarted" in note for note in notes)
    carrier.lost = lambda name, c: False
    for server in servers:
        for _ in range(ENOUGH + 5):
            server.step()
        assert np.abs(server.x - fx.reference(federation.problem())).max() < CLOSE


def test_a_second_server_in_one_folder_is_refused(federation: Federation) -> None:
    carrier = carrier_of(federation)

    def again(round: int) -> None:
        if round == 3:
            with pytest.raises(FederationError, match="another server is running in"):
                federation.run(asked(federation), carrier_of(federation), resume=True)

    carrier.before = again
    assert federation.run(asked(federation, rounds=5), carrier).rounds == 5


def test_requests_of_a_server_that_was_replaced_do_no_harm(federation: Federation) -> None:
    """A server goes on from an older checkpoint while messages of the first are still under way."""
    carrier, folder = carrier_of(federation), federation.folder / "out" / "01-FOCUS"
    federation.run(asked(federation, rounds=10), carrier)
    shutil.copytree(folder, federation.folder / "backup")
    carrier.requests.clear()
    carrier.lost = lambda name, c: name == "site 1" and c.kind == "train"
    federation.run(asked(federation, rounds=20), carrier, resume=True)
    held = {
        c.meta["round"]: c for name, c in carrier.requests if name == "site 1" and "k" in c.meta
    }
    for path in (federation.folder / "backup").iterdir():
        shutil.copy(path, folder / path.name)
    # Of the others only the first visit is lost, so that they do not notice the older checkpoint.
    carrier.lost = lambda name, c: name != "site 1" and 10 <= c.meta.get("round", 0) < 20

    def before(round: int) -> None:  # behind the visit of the round before
        if round - 1 in held:
            carrier.sites[1].answer(held[round - 1])

    carrier.before = before
    result = federation.run(asked(federation, rounds=150), carrier, resume=True)
    assert held.keys() == set(range(10, 20))
    assert is_exact(federation, result)


def test_a_state_folder_copied_to_another_machine_is_told(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier, watched = carrier_of(federation), Watched(monkeypatch, federation.configs())
    folder, copy = federation.folder / "states" / "site 1", federation.folder / "copy"

    def before(round: int) -> None:
        if round == 10:
            shutil.copytree(folder, copy)
        if round == 20:  # and back: the folder of round 10
            shutil.rmtree(folder)
            shutil.copytree(copy, folder)

    carrier.before = before
    result = federation.run(asked(federation, rounds=ENOUGH + 20), carrier)
    notes = [report["note"] for report in reports(federation) if report["note"]]
    assert len(notes) == 1
    assert "'site 1' holds round 8 and round 9 and the server has counted round 19" in notes[0]
    assert watched.worst < 1e-12
    assert is_exact(federation, result)


def test_a_wall_clock_that_jumps_is_not_looked_at(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: float(np.random.default_rng().uniform(0, 1e10)))
    assert Clock().now is roster.time.monotonic
    assert federation.run(asked(federation, rounds=3), carrier_of(federation)).rounds == 3


# --- the handshake --------------------------------------------------------------------------------

CANARY = "Mrs Smith-4711"


def table_of(federation: Federation, k: int, **columns: Any) -> None:
    table = pq.read_table(federation.file(k))
    for name, values in columns.items():
        table = table.drop_columns([name] if name in table.column_names else [])
        if values is not None:
            table = table.append_column(name, pa.array(values))
    pq.write_table(table, federation.file(k))


def refusals(carrier: Scripted) -> list[str]:
    found: list[str] = []

    def look(name: str, content: Content) -> Content:
        if content.kind == "refused":
            found.append(json.dumps(dict(content.meta)))
        return content

    carrier.alter = look
    return found


def test_a_column_that_one_site_does_not_have_is_named(federation: Federation) -> None:
    table_of(federation, 1, x1=None)
    said: list[str] = []
    asks = asked(federation, data={"features": ["x0", "x1"]})
    with pytest.raises(InputError, match=r"column 'x1' .* not at client 'site 1'"):
        federation.run(asked(federation), carrier_of(federation), said)
    with pytest.raises(FederationError, match=r"client 'site 1'.*'x1'"):
        federation.run(asks, carrier_of(federation), said)
    assert any("refused" in line and "'site 1'" in line and "'x1'" in line for line in said)
    table_of(federation, 1, y=None)
    with pytest.raises(FederationError, match=r"client 'site 1'.*'y'"):
        federation.run(asked(federation), carrier_of(federation), said)


def test_text_at_one_site_is_named(federation: Federation) -> None:
    table_of(federation, 1, x1=["a", "b"] * 20)
    with pytest.raises(InputError, match=r"column 'x1' is of different types: .*'site 1'"):
        federation.run(asked(federation), carrier_of(federation))


CELLS: dict[str, dict[str, Any]] = {
    "infinite": {"x1": [1.0] * 39 + [np.inf]},
    "text that is an identifier": {"x1": [f"{CANARY}{k}" for k in range(40)]},
    "text with quotes": {"x1": [f'O\'Brien "{CANARY}" {k}' for k in range(40)]},
    "text target": {"y": [f"{CANARY}{k}" for k in range(40)]},
    "missing": {"x1": [None] * 40},
    "huge": {"x1": [4711.25e120] * 40},
}


@pytest.mark.parametrize("case", CELLS)
def test_a_refusal_names_client_and_column_and_no_cell(
    case: str, federation: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    table_of(federation, 1, **CELLS[case])
    carrier, said = carrier_of(federation), list[str]()
    found = refusals(carrier)
    asks = asked(federation, data={"features": ["x0", "x1"]}, wait=2.0)
    with caplog.at_level(logging.WARNING), pytest.raises((FederationError, InputError)) as error:
        federation.run(asks, carrier, said)
    column = next(iter(CELLS[case]))
    assert "site 1" in str(error.value)
    assert f"'{column}'" in str(error.value) or case == "missing"
    told = " ".join([*found, *said, str(error.value)])
    for secret in ("Smith", "4711", "Brien", "inf'"):
        assert secret not in told
    assert "client 'site 1'" in caplog.text


def test_the_whole_reason_is_in_the_log_of_the_site(
    federation: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    table_of(federation, 1, x1=[1.0] * 39 + [np.inf])
    carrier = carrier_of(federation)
    found = refusals(carrier)
    with caplog.at_level(logging.WARNING), pytest.raises(FederationError):
        federation.run(asked(federation, wait=2.0), carrier)
    assert "row 40" in caplog.text
    assert "inf" in caplog.text
    assert found
    assert all("'x1'" in reason and "40" not in reason for reason in found)


def test_an_error_of_another_kind_tells_its_type_only(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Site) -> Any:
        raise RuntimeError(f"cell {CANARY}")

    monkeypatch.setattr(Site, "_table", broken)
    carrier = carrier_of(federation)
    found = refusals(carrier)
    with pytest.raises(FederationError, match="RuntimeError"):
        federation.run(asked(federation, wait=2.0), carrier)
    assert found
    assert not any("Smith" in reason for reason in found)
    assert CANARY in caplog.text


def test_no_single_target_leaves_a_site(federation: Federation) -> None:
    largest = {float(np.max(y)) for _, y in federation.rows}
    carrier = carrier_of(federation)
    sent: list[Content] = []
    carrier.alter = lambda name, c: sent.append(c) or c
    federation.run(asked(federation, rounds=2), carrier)
    numbers = {float(v) for c in sent for a in c.arrays.values() for v in np.ravel(a)}
    texts = " ".join(json.dumps(dict(c.meta)) for c in sent)
    assert not largest & numbers
    assert not any(repr(value) in texts for value in largest)


def test_messages_that_are_not_understood_are_refused_by_the_site(
    federation: Federation,
) -> None:
    carrier = carrier_of(federation)
    federation.run(asked(federation, rounds=2), carrier)
    train = next(c for _, c in reversed(carrier.requests) if c.kind == "train")
    query = next(c for _, c in reversed(carrier.requests) if c.kind == "query")
    site = carrier.sites[2]
    other = meta(query, calls=[{"fn": "os.system", "over": "sum_over_rows", "args": 0}])
    inside = meta(query, calls=[{**query.meta["calls"][0], "over": "__init__"}])
    for content in (
        Content("obey", {}), Content("train", {}), other, inside, meta(train, run="../../x"),
        meta(train, algorithm={"record": "Huber", "delta": 1.0}), meta(train, algorithm=None),
    ):  # fmt: skip
        answer = site.answer(content)
        assert answer.kind == "refused"
        assert answer.meta["client"] == "site 2"
    assert not (federation.folder / "x").exists()


# --- reports and results --------------------------------------------------------------------------


def test_a_line_of_the_report_has_all_fields(federation: Federation) -> None:
    carrier = Scripted(federation.configs(), Faults(lost_reply=0.2, duplicate=0.2), seed=1)
    federation.run(asked(federation, rounds=12), carrier)
    for round, report in enumerate(reports(federation)):
        assert report.keys() == {
            "algorithm", "round", "invited", "counted", "failed", "late", "duplicates",
            "bytes_up", "bytes_down", "seconds", "note", "rows",
        }  # fmt: skip
        assert (report["algorithm"], report["round"]) == ("FOCUS", round)
        assert {*report["counted"], *report["failed"]} == set(report["invited"])
        assert report["bytes_down"] > 0
        assert report["rows"] == 40 * len(report["counted"])


def test_the_history_has_the_columns_of_a_run_in_process(
    federation: Federation, plain_answer: fx.Result
) -> None:
    there = fx.solve(federation.problem(), fx.FOCUS(), rounds=ENOUGH, engine="loop", record_every=1)
    history, known = plain_answer.history, there.history
    assert history.schema == known.schema
    for name in ("round", "participants", "uploads", "gradient_evaluations"):
        ours = history[name].to_pylist()
        theirs = known.filter(pc.field("round") > 0)[name].to_pylist()
        assert ours == theirs, name
    value = history["objective"].to_numpy()
    assert value[-1] == pytest.approx(known["objective"].to_numpy()[-1], rel=1e-12)
    # A row tells of the model with which its round began.
    before = known["gradient_mapping"].to_numpy()[:20]
    assert history["gradient_mapping"].to_numpy()[:20] == pytest.approx(before, rel=1e-6)
    assert np.all(np.diff(history["bytes_up"].to_numpy()) > 0)
    loaded = fx.Result.load(
        next((federation.folder / "..").glob("**/none"), None) or _saved(federation)
    )
    assert loaded.rounds == 2


def _saved(federation: Federation) -> Path:
    federation.run(asked(federation, rounds=2), carrier_of(federation))
    return federation.folder / "out" / "runs" / "01-FOCUS-seed0.npz"


def test_the_tolerance_stops_a_run_in_which_everybody_takes_part(federation: Federation) -> None:
    carrier = carrier_of(federation)
    result = federation.run(asked(federation, rounds=500, tol=1e-6), carrier)
    assert result.status == "tolerance"
    assert result.rounds < 100
    assert np.linalg.norm(federation.problem().grad(result.x)) <= 1e-6
    assert result.history.num_rows == result.rounds
    again = federation.run(asked(federation, rounds=500, tol=1e-6), carrier, resume=True)
    assert again.x.tobytes() == result.x.tobytes()
    closer = federation.run(asked(federation, rounds=500, tol=1e-9), carrier, resume=True)
    assert closer.rounds > result.rounds
    assert is_exact(federation, closer)


def test_the_tolerance_is_looked_at_now_and_then_where_not_everybody_takes_part(
    federation: Federation,
) -> None:
    carrier = carrier_of(federation)
    pattern = {"name": "uniform", "m": 2}
    asks = asked(federation, rounds=500, tol=1e-6, participation=pattern, check_every=7)
    result = federation.run(asks, carrier)
    assert result.status == "tolerance"
    assert result.rounds < 400
    assert np.linalg.norm(federation.problem().grad(result.x)) <= 1e-6
    looked = [v is not None for v in result.history["gradient_mapping"].to_pylist()]
    assert [r for r, found in enumerate(looked) if found] == list(range(7, len(looked), 7))


def test_a_pass_that_somebody_misses_does_not_end_the_run(federation: Federation) -> None:
    carrier = carrier_of(federation)
    carrier.lost = lambda name, c: (name, c.kind) == ("site 1", "query") and carrier.exchanges > 0
    pattern = {"name": "uniform", "m": 2}
    said: list[str] = []
    asks = asked(federation, rounds=20, tol=1e-12, participation=pattern, wait=2.0)
    result = federation.run(asks, carrier, said)
    assert result.rounds == 20
    assert result.certificate is None
    assert "no certificate" in result.message
    assert sum("no pass over all rows after round" in line for line in said) == 1


@pytest.mark.parametrize(
    ("algorithm", "pattern"),
    [
        ({"name": "FOCUS", "lr": 50.0}, {"name": "full"}),
        ({"name": "FOCUS", "lr": 1e3}, {"name": "uniform", "m": 2}),
        ({"name": "SCAFFOLD", "lr": 1e60}, {"name": "full"}),
    ],
)
def test_divergence_is_noticed_and_the_last_good_model_kept(
    algorithm: dict[str, Any], pattern: dict[str, Any], federation: Federation
) -> None:
    asks = asked(federation, algorithm, rounds=400, participation=pattern)
    result = federation.run(asks, carrier_of(federation))
    assert result.status == "diverged"
    assert "lower lr" in result.message
    assert np.all(np.isfinite(result.x))
    assert result.rounds < 400


# --- objects instead of rows ----------------------------------------------------------------------

OBJECTS = """
import numpy as np

class Squares:
    def __init__(self, X, y):
        self.X, self.y = X, y
        self.n_rows, self.dim = X.shape
        values = np.linalg.eigvalsh(X.T @ X / len(y))
        self.strong_convexity, self.smoothness = values[0], values[-1]
    def value(self, x):
        return 0.5 * np.mean((self.X @ x - self.y) ** 2)
    def grad(self, x):
        return self.X.T @ (self.X @ x - self.y) / self.n_rows

class WithAll(Squares):
    def prox(self, v, step):
        A = np.eye(self.dim) + step * self.X.T @ self.X / self.n_rows
        return np.linalg.solve(A, v + step * self.X.T @ self.y / self.n_rows)
    def stochastic_grad(self, x, seed, batch_size):
        rows = np.random.default_rng(seed).choice(self.n_rows, batch_size, replace=False)
        return self.X[rows].T @ (self.X[rows] @ x - self.y[rows]) / batch_size
    def hessian(self, x):
        return self.X.T @ self.X / self.n_rows

class Shapeless(Squares):
    def grad(self, x):
        return np.zeros(self.dim + 1)

class Gradless:
    n_rows, dim, smoothness = 5, 3, 1.0
    def value(self, x):
        return 0.0

class Backwards(Squares):
    def __init__(self, X, y):
        super().__init__(X, y)
        self.strong_convexity = 2 * self.smoothness

def _of(cls, k):
    found = np.load(f"rows{k}.npz")
    return cls(found["X"], found["y"])
"""
KINDS = ("Squares", "WithAll", "Shapeless", "Backwards")


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Federation]:
    """A federation whose sites have objects; noise-free targets where `consistent`."""
    module = f"objects_of_{abs(hash(tmp_path))}"
    makers = [f"def {c}{k}(): return _of({c}, {k})" for c in KINDS for k in range(3)]
    text = "\n".join([OBJECTS, *makers, *(f"def Gradless{k}(): return Gradless()" for k in "012")])
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])

    def make(kinds: Sequence[str], consistent: bool = False) -> Federation:
        found = []
        for k, (X, y) in enumerate(rows(d=3)):
            y = X @ [1.0, -2.0, 0.5] if consistent else y
            np.savez(tmp_path / f"rows{k}.npz", X=X, y=y)
            found.append((X, y))
        federation = Federation(tmp_path, [f"site {k}" for k in range(3)], found, "squared")
        configs = [
            SiteConfig.from_mapping(
                {
                    "client-id": name,
                    "state-dir": str(tmp_path / "states" / name),
                    "oracle": f"{module}:{kind}{k}",
                }
            )
            for k, (name, kind) in enumerate(zip(federation.names, kinds, strict=True))
        ]
        federation.configs = lambda: configs
        federation.problem = lambda: fx.Problem(found, loss="squared", names=federation.names)
        return federation

    return make


def with_objects(
    federation: Federation, algorithm: Mapping[str, Any], rounds: int
) -> config.Experiment:
    return config.parse(
        {
            "rounds": rounds,
            "data": {"sites": "oracles"},
            "problem": {},
            "algorithms": [dict(algorithm)],
            "deploy": {"clients": federation.names, "deadline": 5.0, "wait": 2.0},
        }
    )


@pytest.mark.parametrize(
    ("kind", "algorithm", "rounds"),
    [
        ("Squares", {"name": "FOCUS"}, 300),
        pytest.param("Squares", {"name": "FedDR"}, 300, marks=pytest.mark.slow),
        pytest.param("WithAll", {"name": "FedDR"}, 300, marks=pytest.mark.slow),
        ("WithAll", {"name": "PushNewton"}, 12),
    ],
)
def test_objects_reach_the_pooled_answer(
    kind: str, algorithm: dict[str, Any], rounds: int, objects: Callable[..., Federation]
) -> None:
    federation = objects([kind] * 3)
    result = federation.run(with_objects(federation, algorithm, rounds), carrier_of(federation))
    assert np.abs(result.x - fx.reference(federation.problem())).max() < 1e-9
    assert all(report["failed"] == {} for report in reports(federation))
    assert result.certificate is not None
    assert result.certificate.gradient_mapping < 1e-8
    value = federation.problem().value(result.x)
    assert result.history["objective"].to_pylist()[-1] == pytest.approx(value, rel=1e-12)


@pytest.mark.slow
def test_objects_serve_mini_batches(objects: Callable[..., Federation]) -> None:
    federation = objects(["WithAll"] * 3, consistent=True)
    algorithm = {"name": "SCAFFOLD", "batch_size": 10, "local_steps": 2, "lr": 0.3}
    result = federation.run(with_objects(federation, algorithm, 300), carrier_of(federation))
    assert np.abs(result.x - [1.0, -2.0, 0.5]).max() < 1e-9


def test_a_method_that_an_object_lacks_is_named_in_every_round(
    objects: Callable[..., Federation],
) -> None:
    federation = objects(["WithAll", "Squares", "WithAll"])
    asks = with_objects(federation, {"name": "PushNewton"}, 3)
    federation.run(asks, carrier_of(federation))
    for report in reports(federation):
        assert report["counted"] == ["site 0", "site 2"]
        assert "hessian" in report["failed"]["site 1"]["reason"]
        assert "Squares" in report["failed"]["site 1"]["reason"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("Gradless", "Gradless has no grad"), ("Backwards", "0 <= l <= L"), ("No", "no attribute")],
)
def test_a_wrong_object_is_refused_by_name(
    kind: str, reason: str, objects: Callable[..., Federation]
) -> None:
    federation, said = objects(["WithAll", kind, "WithAll"]), list[str]()
    with pytest.raises(FederationError, match=f"site 1.*{reason}"):
        federation.run(with_objects(federation, FOCUS, 3), carrier_of(federation), said)


def test_an_object_that_returns_another_shape_is_refused_by_name(
    objects: Callable[..., Federation], caplog: pytest.LogCaptureFixture
) -> None:
    federation = objects(["WithAll", "Shapeless", "WithAll"])
    result = federation.run(with_objects(federation, FOCUS, 3), carrier_of(federation))
    for report in reports(federation):
        assert report["failed"]["site 1"]["code"] == "request"
        assert "client 'site 1'" in report["failed"]["site 1"]["reason"]
    assert "the oracle returned the shape (4,), wanted (3,)" in caplog.text
    assert result.certificate is None
    assert "'site 1'" in result.message


def test_rows_at_one_site_and_an_object_at_another_are_refused(
    objects: Callable[..., Federation], federation: Federation
) -> None:
    mixed = objects(["WithAll"] * 3)
    configs = [federation.configs()[0], *mixed.configs()[1:]]
    with pytest.raises(FederationError, match=r"site 0.*configured with rows"):
        mixed.run(with_objects(mixed, FOCUS, 3), Scripted(configs))


# --- every algorithm, every loss ------------------------------------------------------------------


def same_as_the_loop_engine(
    federation: Federation, experiment: config.Experiment, problem: fx.Problem
) -> fx.Result:
    deployed = federation.run(experiment, carrier_of(federation))
    given = next(iter(experiment.deployed().build_algorithms().values()))
    there = fx.solve(problem, given, rounds=experiment.rounds, engine="loop")
    assert deployed.server.keys() == there.server.keys()
    for name, array in there.server.items():
        assert np.abs(array - deployed.server[name]).max(initial=0.0) <= 1e-12 * max(
            1.0, np.abs(array).max(initial=0.0)
        ), name
    assert deployed.exactness == there.exactness
    assert np.abs(deployed.x - there.x).max() <= 1e-12 * max(1.0, np.abs(there.x).max())
    ours, theirs = deployed.certificate, fx.certify(problem, deployed.x)
    assert ours is not None
    assert ours.verdict == theirs.verdict
    assert ours.gradient_mapping == pytest.approx(theirs.gradient_mapping, rel=1e-9, abs=1e-12)
    for name in ("standard_errors", "coefficient_bounds_se"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert (mine is None) == (other is None)
        assert mine is None or mine == pytest.approx(other, rel=1e-6)
    return deployed


@pytest.mark.parametrize("name", fx.ALGORITHMS)
def test_every_algorithm_is_that_of_the_loop_engine(name: str, federation: Federation) -> None:
    experiment = asked(federation, {"name": name}, rounds=3)
    same_as_the_loop_engine(federation, experiment, federation.problem())


PROBLEMS: dict[str, dict[str, Any]] = {
    "multinomial": {"loss": "multinomial", "fit_intercept": True, "l2": 0.1},
    "poisson": {"loss": "poisson", "fit_intercept": True},
    "huber": {"loss": "huber", "fit_intercept": True},
    "clients": {"loss": "logistic", "fit_intercept": True, "weights": "clients"},
    "sum": {"loss": "logistic", "fit_intercept": False, "l2": 1.0, "reduction": "sum"},
}


@pytest.mark.parametrize("case", fast_only(PROBLEMS, ("poisson", "clients")))
def test_every_loss_is_that_of_the_loop_engine(case: str, tmp_path: Path) -> None:
    settings = PROBLEMS[case]
    federation = Federation.of(rows(settings["loss"]), settings["loss"], tmp_path)
    experiment = asked(federation, {"name": "SCAFFOLD"}, rounds=3, problem=settings)
    loss = Multinomial(3) if case == "multinomial" else settings["loss"]
    problem = fx.Problem(federation.rows, names=federation.names, **{**settings, "loss": loss})
    same_as_the_loop_engine(federation, experiment, problem)


def test_weights_by_name_and_standardized_columns(tmp_path: Path) -> None:
    federation = Federation.of(rows(), "squared", tmp_path)
    weights = {"site 2": 3.0, "site 0": 1.0, "site 1": 0.5}
    experiment = asked(federation, FOCUS, 3, {"weights": weights, "l2": 0.2}, {"standardize": True})
    X = np.concatenate([X for X, _ in federation.rows])
    mean, sd = X.mean(axis=0), X.std(axis=0)
    problem = fx.Problem(
        [((X - mean) / sd, y) for X, y in federation.rows], loss="squared", fit_intercept=True,
        l2=0.2, weights=[1.0, 0.5, 3.0], names=federation.names,
    )  # fmt: skip
    same_as_the_loop_engine(federation, experiment, problem)


@pytest.mark.slow
def test_lasso_by_splitting_has_the_certificate_of_the_pooled_problem(tmp_path: Path) -> None:
    federation = Federation.of(rows(d=3), "squared", tmp_path)
    settings = {"regularizer": {"name": "l1", "strength": 0.3}}
    experiment = asked(federation, {"name": "FedDR"}, 60, settings)
    problem = fx.Problem(
        federation.rows, loss="squared", fit_intercept=True, names=federation.names,
        regularizer=fx.L1(0.3),
    )  # fmt: skip
    result = same_as_the_loop_engine(federation, experiment, problem)
    assert np.any(result.x == 0.0)
    assert np.abs(result.x - fx.reference(problem)).max() < 1e-6


# --- secure sums ----------------------------------------------------------------------------------


def test_a_secure_run_has_the_certificate_of_the_plain_one(
    federation: Federation, plain_answer: fx.Result
) -> None:
    secure = federation.run(asked(federation, secure=True), carrier_of(federation))
    ours, theirs = secure.certificate, plain_answer.certificate
    assert ours is not None
    assert theirs is not None
    assert ours.verdict == theirs.verdict == "certified"
    assert ours.gradient_mapping == pytest.approx(theirs.gradient_mapping, abs=1e-12)
    assert ours.standard_errors == pytest.approx(theirs.standard_errors, rel=1e-9)
    assert np.abs(secure.x - plain_answer.x).max() < 1e-12


def test_a_secure_sum_needs_two(federation: Federation) -> None:
    carrier = carrier_of(federation)

    def lost(name: str, content: Content) -> bool:
        round = content.meta.get("round", 0)
        return (name == "site 2" and 4 <= round < 12) or (name == "site 1" and 8 <= round < 12)

    carrier.lost = lost
    said: list[str] = []
    result = federation.run(asked(federation, rounds=ENOUGH + 10, secure=True), carrier, said)
    found = reports(federation)
    for report in found[4:8]:
        assert report["counted"] == ["site 0", "site 1"]
    for report in found[8:12]:
        assert report["counted"] == []
        assert report["note"] == "no upload"
        assert report["failed"]["site 0"]["code"] == "aborted"
        assert "too few are left" in report["failed"]["site 0"]["reason"]
    assert sum("no upload" in line for line in said) == 4
    assert is_exact(federation, result)


def test_masks_that_do_not_cancel_cost_the_round_and_are_told(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier, watched = carrier_of(federation), Watched(monkeypatch, federation.configs())

    def alter(name: str, content: Content) -> Content:
        bad = name == "site 1" and content.meta.get("round") in (3, 7)
        return (
            arrays(content, masked=content.arrays["masked"] ^ np.uint64(2**60)) if bad else content
        )

    carrier.alter = alter
    result = federation.run(asked(federation, secure=True), carrier)
    noted = [report for report in reports(federation) if report["note"]]
    assert [report["round"] for report in noted] == [3, 7]
    assert all("the masks do not cancel" in report["note"] for report in noted)
    assert watched.worst < 1e-12
    assert is_exact(federation, result)


def test_a_federation_of_one_cannot_be_secure(tmp_path: Path) -> None:
    federation = Federation.of(rows(N=1), "squared", tmp_path)
    with pytest.raises(InputError, match="at least 2 members"):
        federation.run(asked(federation, rounds=2, secure=True), carrier_of(federation))


def test_two_sites_with_one_key_are_named(federation: Federation) -> None:
    carrier = carrier_of(federation)
    for k in (0, 1):
        carrier.sites[k].answer(Content("hello", {"spec": None}))
    states = federation.folder / "states"
    shutil.copy(states / "site 0" / "secure-key", states / "site 1" / "secure-key")
    with pytest.raises(InputError, match="'site 0' and 'site 1' have the same public key"):
        federation.run(asked(federation, rounds=2, secure=True), carrier)


def test_one_client_alone_is_a_federation(tmp_path: Path) -> None:
    federation = Federation.of(rows(N=1), "squared", tmp_path)
    result = federation.run(asked(federation), carrier_of(federation))
    assert is_exact(federation, result)


def test_the_outcome_has_all_algorithms(federation: Federation) -> None:
    experiment = asked(federation, rounds=2, algorithms=[FOCUS, {"name": "PushNewton"}])
    outcome = run_federation(
        carrier_of(federation), experiment, federation.folder / "out", lambda line: None,
        clock=passing(),
    )  # fmt: skip
    assert [run.label for run in outcome.runs] == ["FOCUS", "PushNewton"]
    assert {report["algorithm"] for report in reports(federation)} == {"FOCUS", "PushNewton"}
    assert dataclasses.is_dataclass(outcome.runs[0].result)


# --- joining later --------------------------------------------------------------------------------


def test_a_run_with_other_members_starts_from_the_model_reached(tmp_path: Path) -> None:
    early = Federation.of(rows()[:2], "squared", tmp_path / "early")
    reached = early.run(asked(early, FOCUS, rounds=60), carrier_of(early))
    saved = next((early.folder / "out" / "runs").glob("*.npz"))
    late = Federation.of(rows(), "squared", tmp_path / "late")
    result = late.run(asked(late, FOCUS, rounds=2, start=str(saved)), carrier_of(late))
    first = result.history["objective"].to_pylist()[0]
    assert first == pytest.approx(late.problem().value(reached.x), rel=1e-12)
    with pytest.raises(InputError, match="another run: start differ"):
        late.run(asked(late, FOCUS, rounds=2), carrier_of(late), resume=True)


def test_a_reply_larger_than_any_that_can_be_needed_is_not_read(federation: Federation) -> None:
    carrier, sizes = carrier_of(federation), list[int]()

    def measured(name: str, content: Content) -> Content:
        sizes.append(content.size)
        return content

    carrier.alter = measured
    federation.run(asked(federation, rounds=2), carrier)
    assert max(sizes) < carrier.limit < 2**22
