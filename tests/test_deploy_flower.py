"""Flower's side of a deployment: messages, apps, keys, and processes that leave nothing behind."""

from __future__ import annotations

import json
import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    load_ssh_private_key,
    load_ssh_public_key,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.common.config import parse_config_args
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from typer.testing import CliRunner

from fedexact import cli, config
from fedexact.data import tables
from fedexact.deploy import app as apps
from fedexact.deploy import client_app, commands, flower, local, server_app
from fedexact.deploy.certs import client_key, make_certs
from fedexact.deploy.flower import DTYPES, RAW, FlowerTransport, from_record, to_record
from fedexact.deploy.local_data import at_sites
from fedexact.deploy.messages import REFUSED, Content, Failure, RefusedError
from fedexact.deploy.supervise import Group, Supervisor, process_table
from fedexact.errors import InputError
from problems import THREE_SITES

SUPERLINK = 1  # its own node id

TABLE = "site,age,dose,y\n" + "".join(
    f"{'CAB'[i % 3]},{40 + (7 * i) % 31},{(5 * i) % 8 or ''},{int((i * i) % 5 > 1)}\n"
    for i in range(60)
)


@pytest.fixture(autouse=True)
def _task() -> None:
    """What Flower's own processes set before an app runs; `Message` does not work without."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 7, 8, SUPERLINK


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """An experiment on three sites, with missing cells."""
    (tmp_path / "table.csv").write_text(TABLE)
    members = '\n[deploy]\nclients = ["A", "B", "C"]\n'
    (tmp_path / "three.toml").write_text("rounds = 5\n" + THREE_SITES + members)
    return tmp_path / "three.toml"


def on_the_wire(message: Message) -> Message:
    """Written and read as Flower does it between processes."""
    contents = {id: one.deflate() for id, one in get_all_nested_objects(message).items()}
    arrived: Any = inflate_object_from_contents(message.object_id, contents)
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
    return arrived


def carried(content: Content) -> Content:
    return from_record(on_the_wire(Message(to_record(content), 5, "query")).content)


def same(a: Content, b: Content) -> bool:
    return (
        a.kind == b.kind
        and a.meta == b.meta
        and a.arrays.keys() == b.arrays.keys()
        and all(
            x.dtype == b.arrays[name].dtype
            and x.shape == b.arrays[name].shape
            and x.tobytes() == b.arrays[name].tobytes()
            for name, x in a.arrays.items()
        )
    )


# --- messages -------------------------------------------------------------------------------------


def test_a_message_needs_the_identity_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    # Private to Flower: should it move, the fixture above and the in-process grids move with it.
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, None)
    with pytest.raises(RuntimeError, match="is not set"):
        Message(RecordDict(), 5, "query")


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.sampled_from(sorted(DTYPES)).flatmap(
            lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, min_side=0, max_side=4))
        ),
        max_size=4,
    ),
    st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False) | st.integers() | st.text()),
)
def test_messages_arrive_bit_for_bit(arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
    sent = Content("train", meta, arrays)
    assert same(carried(sent), sent)


def test_bits_that_arithmetic_would_lose_arrive() -> None:
    nan = np.array([0x7FF8000000000001, 0xFFF0000000000000, 1, 1 << 63], np.uint64)
    big = np.arange(6.0).reshape(2, 3).astype(">f8")
    arrays = {"nan": nan.view(np.float64), "turned": np.arange(6.0).reshape(2, 3).T}
    arrived = carried(Content("query", {}, arrays | {"big": big})).arrays
    assert np.array_equal(arrived["nan"].view(np.uint64), nan)
    assert np.array_equal(arrived["turned"], arrays["turned"])
    assert arrived["big"].dtype == np.float64
    assert np.array_equal(arrived["big"], big)
    assert arrived["turned"].flags.writeable


def test_what_cannot_travel_is_refused_by_the_sender() -> None:
    with pytest.raises(TypeError, match="'x' is of type float32"):
        to_record(Content("train", {}, {"x": np.zeros(3, np.float32)}))
    with pytest.raises(TypeError, match="not JSON serializable"):
        to_record(Content("train", {"x": object()}))


def record(meta: str = "{}", **arrays: Array) -> RecordDict:
    head = ConfigRecord({"kind": "train", "meta": meta})
    return RecordDict({flower.HEAD: head, flower.ARRAYS: ArrayRecord(arrays)})


def raw(shape: tuple[int, ...], data: bytes, dtype: str = "float64", stype: str = RAW) -> Array:
    return Array(dtype=dtype, shape=shape, stype=stype, data=data)


MALFORMED = {
    "not both there": RecordDict(),
    "not both text": RecordDict(
        {flower.HEAD: ConfigRecord({"kind": 3, "meta": "{}"}), flower.ARRAYS: ArrayRecord()}
    ),
    "'x': 8 bytes for float64\\[2\\]": record(x=raw((2,), bytes(8))),
    "'x': 16 bytes for float64\\[\\]": record(x=raw((), bytes(16))),
    "'x': shape \\(-1, -1\\)": record(x=raw((-1, -1), bytes(8))),
    "'x': shape \\(1, 1": record(x=raw((1,) * 40, bytes(8))),
    "'x': type 'object'": record(x=raw((1,), bytes(8), "object")),
    "numpy.ndarray": record(x=Array(np.zeros(2))),
    "'x': shape \\(0, ": record(x=raw((0, 2**62, 2**62), b"")),
    "not JSON": record("{"),
    "not JSON: maximum recursion": record("[" * 100_000),
    "not an object": record("[1]"),
}


@pytest.mark.parametrize("words", MALFORMED)
def test_a_malformed_record_is_refused(words: str) -> None:
    with pytest.raises(RefusedError, match=f"malformed: .*{words}"):
        from_record(MALFORMED[words])


def test_a_record_is_refused_by_its_declared_size(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = record(small=raw((1,), bytes(8)), x=raw((3,), bytes(24)))
    assert from_record(fine, 34).size == 32
    monkeypatch.setattr(flower, "_unpacked", lambda *_: pytest.fail("an array was built"))
    with pytest.raises(RefusedError, match="too large: 'train', most of it the array 'x', float64"):
        from_record(fine, 33)
    with pytest.raises(RefusedError, match=r"too large: .*10000000002 bytes, "):
        from_record(record(x=raw((1_250_000_000,), b"")), 1000)
    with pytest.raises(RefusedError, match="too large: 'train', meta data"):
        from_record(record('"' + "a" * 2000 + '"'), 1000)


# --- the transport and the apps -------------------------------------------------------------------


class LoopGrid(Grid):
    """Hands every message to the ClientApp of its node, in this process."""

    def __init__(self, nodes: Mapping[int, Mapping[str, Any]]) -> None:
        self.nodes = nodes
        self.sent: dict[str, Message] = {}
        self.answer: Callable[[Message], Iterable[Message]] = lambda m: [self.by_app(m)]

    def by_app(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        context = Context(8, node, dict(self.nodes[node]), RecordDict(), {})
        return client_app.app(on_the_wire(message), context)

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            ids.append(f"message-{len(self.sent)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.sent[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [reply for id in message_ids for reply in self.answer(self.sent.pop(id))]

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def send_and_receive(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class Unseen:
    """Nobody watches."""

    def begin(self, label: str, seed: int, rounds: int) -> None: ...
    def advance(self, progress: Any) -> None: ...
    def end(self, run: Any) -> None: ...


class EchoSite:
    """Answers with the request, and who it is."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings

    def answer(self, content: Content) -> Content:
        meta = {**content.meta, "client": self.settings["client-id"]}
        return Content(content.kind, meta, content.arrays)


class EchoConfig:
    @staticmethod
    def from_mapping(settings: Mapping[str, Any]) -> Mapping[str, Any]:
        if "client-id" not in settings:
            raise InputError("client-id is missing")
        return settings


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> LoopGrid:
    monkeypatch.setattr(client_app, "Site", EchoSite)
    monkeypatch.setattr(client_app, "SiteConfig", EchoConfig)
    return LoopGrid({11: {"client-id": "A"}, 22: {"client-id": "B"}})


def test_requests_go_through_the_client_app_and_back(grid: LoopGrid) -> None:
    transport = FlowerTransport(grid)
    assert transport.nodes() == [11, 22]
    x = np.linspace(0.0, 1.0, 5)
    batch = [(22, Content("train", {"round": 3}, {"x": x})), (11, Content("hello", {}))]
    ids = transport.send(batch)
    assert [m.metadata.message_type for m in grid.sent.values()] == ["train", "query"]
    assert [m.metadata.group_id for m in grid.sent.values()] == ["3", ""]
    replies = {reply.id: reply for reply in transport.receive(ids)}
    assert [replies[id].node for id in ids] == [22, 11]
    assert same(replies[ids[0]].content, Content("train", {"round": 3, "client": "B"}, {"x": x}))  # pyright: ignore
    assert same(replies[ids[1]].content, Content("hello", {"client": "A"}))  # pyright: ignore
    assert transport.receive(ids) == []


def test_a_site_does_not_upload_more_than_is_allowed(
    grid: LoopGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_app, "LIMIT", 39)
    transport = FlowerTransport(grid)
    ids = transport.send([(11, Content("train", {}, {"x": np.zeros(n)})) for n in (4, 5)])
    fine, large = (reply.content for reply in transport.receive(ids))
    assert isinstance(fine, Content)
    assert isinstance(large, Content)
    assert fine.kind == "train"
    assert large.meta == {"code": "too large", "reason": "40 bytes, allowed are 39"}


def test_the_client_app_refuses_with_a_reason(grid: LoopGrid) -> None:
    grid.nodes = {11: {}}
    context = Context(8, 11, {}, RecordDict(), {})
    bad = client_app.app(Message(RecordDict(), 11, "train"), context)
    assert from_record(bad.content).kind == REFUSED
    assert from_record(bad.content).meta["code"] == "malformed"
    transport = FlowerTransport(grid)
    reply = transport.receive(transport.send([(11, Content("hello", {}))]))[0].content
    assert isinstance(reply, Content)
    assert reply.meta == {"code": "data", "reason": "client-id is missing"}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (2, "raised an error: oops"),
        (3, "expired"),
        (5, "not connected"),
        (8, "crashed"),
        (99, "not"),
    ],
)
def test_errors_are_of_the_node_that_was_asked(grid: LoopGrid, code: int, words: str) -> None:
    def answer(message: Message) -> list[Message]:
        reply = Message(Error(code, "oops"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = SUPERLINK
        return [reply]

    grid.answer = answer
    transport = FlowerTransport(grid)
    reply = transport.receive(transport.send([(22, Content("train", {}))]))[0]
    assert reply.node == 22
    assert isinstance(reply.content, Failure)
    assert reply.content.code == str(code)
    assert words in reply.content.reason


def test_duplicates_are_passed_on_and_late_replies_found(grid: LoopGrid) -> None:
    held: list[Message] = []
    grid.answer = lambda message: held.append(grid.by_app(message)) or []
    transport = FlowerTransport(grid)
    ids = transport.send([(11, Content("train", {"round": 1})), (22, Content("train", {}))])
    grid.sent |= {id: grid.sent[id] for id in ids}
    late = dict(grid.sent)
    assert transport.receive(ids) == []
    grid.sent = late
    grid.answer = lambda message: [grid.by_app(message), grid.by_app(message)]
    assert [reply.id for reply in transport.receive(ids)] == [ids[0], ids[0], ids[1], ids[1]]


def test_replies_that_are_too_large_or_unreadable_fail_alone(grid: LoopGrid) -> None:
    def answer(message: Message) -> list[Message]:
        if message.metadata.dst_node_id == 11:
            raise ValueError("Unexpected set of children")
        return [Message(record(x=raw((1_250_000_000,), b"")), reply_to=message)]

    grid.answer = answer
    transport = FlowerTransport(grid, limit=1000)
    ids = transport.send([(node, Content("train", {})) for node in (11, 22)])
    unreadable, large = transport.receive(ids)
    assert (unreadable.node, large.node) == (11, 22)
    assert isinstance(unreadable.content, Failure)
    assert isinstance(large.content, Failure)
    assert (unreadable.content.code, large.content.code) == ("malformed", "too large")
    assert "Unexpected set of children" in unreadable.content.reason
    assert "'x'" in large.content.reason
    assert transport.receive(ids) == []


def test_messages_that_the_superlink_does_not_take_fail(
    grid: LoopGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = FlowerTransport(grid)
    for taken in ([], [None, "one"]):
        monkeypatch.setattr(grid, "push_messages", lambda messages, taken=taken: taken)
        ids = transport.send([(11, Content("train", {})), (22, Content("train", {}))])
        failed = transport.receive([id for id in ids if id != "one"])
        assert [r.node for r in failed] == ([11] if taken else [11, 22])
        assert all(isinstance(r.content, Failure) and r.content.code == "unsent" for r in failed)


def test_a_superlink_that_is_gone_is_not_the_nodes_failure(grid: LoopGrid) -> None:
    def answer(message: Message) -> list[Message]:
        raise ConnectionError("refused")

    grid.answer = answer
    transport = FlowerTransport(grid)
    ids = transport.send([(11, Content("train", {}))])
    with pytest.raises(ConnectionError):
        transport.receive(ids)


def test_the_server_app_runs_the_experiment_of_its_folder(
    three: Path, grid: LoopGrid, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    out = three.parent / "out"
    asked: list[tuple[list[str], Path, bool]] = []

    def run_federation(transport: Any, experiment: Any, out: Path, say: Any, resume: bool) -> Any:
        asked.append((experiment.labels, out, resume))
        say("round 1: 2 of 2")
        prepared = config.prepare(experiment)
        return config.run(prepared, config.Store(out, experiment, False), Unseen())

    monkeypatch.setattr(server_app, "run_federation", run_federation)
    app = server_app.server_app(three.parent)
    settings = {"experiment": "three.toml", "out": str(out), "resume": True}
    app(grid, Context(8, SUPERLINK, {}, RecordDict(), settings))  # pyright: ignore
    assert asked == [(["FedAvg", "FOCUS"], out, True)]
    lines = (out / apps.PROGRESS).read_text().splitlines()
    assert lines[0] == "round 1: 2 of 2"
    assert lines[1].startswith("FedAvg: ")
    assert lines[-1] == apps.FINISHED
    assert "verdict" in capsys.readouterr().out  # the table


def test_the_server_app_says_how_it_failed(three: Path, grid: LoopGrid) -> None:
    out = three.parent / "out"
    app = server_app.server_app(three.parent)
    settings: dict[str, Any] = {"experiment": "four.toml", "out": str(out)}
    with pytest.raises(InputError, match=r"four\.toml: no such file"):
        app(grid, Context(8, SUPERLINK, {}, RecordDict(), settings))
    last = (out / apps.PROGRESS).read_text().splitlines()[-1]
    assert last.startswith(apps.FAILED)
    assert "four.toml" in last
    with pytest.raises(InputError, match="must name experiment"):
        app(grid, Context(8, SUPERLINK, {}, RecordDict(), {"experiment": "three.toml"}))


# --- the app's folder -----------------------------------------------------------------------------


def flwr(*arguments: str, home: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [local.executable("flwr"), *arguments]
    env = local.environment(home)
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)


def test_init_writes_an_app_that_flower_builds(three: Path, tmp_path: Path) -> None:
    folder = tmp_path / "Three-sites"
    files = apps.init(folder, three, out="/srv/out")
    assert {path.name for path in files} == {
        "pyproject.toml", "server_app.py", "experiment.toml", "README.md"
    }  # fmt: skip
    assert (folder / "experiment.toml").read_text() == three.read_text()
    built = flwr("build", "--app", str(folder), home=tmp_path / "home", cwd=tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    assert len(list(tmp_path.glob("fedexact.three-sites.1-0-0.*.fab"))) == 1


def test_init_refuses_what_flower_would_not_take(three: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not an empty folder"):
        apps.init(tmp_path, three)
    for name in ("my_app", "3sites", "a" * 33):
        with pytest.raises(InputError, match="has a name of"):
            apps.init(tmp_path / name, three)
    three.write_text(THREE_SITES)
    with pytest.raises(InputError, match=r"name the members in \[deploy\]"):
        apps.init(tmp_path / "app", three)
    three.write_text("rounds = 0")
    with pytest.raises(InputError, match="rounds"):
        apps.init(tmp_path / "app", three)
    assert not (tmp_path / "app").exists()


# --- keys -----------------------------------------------------------------------------------------


def handshake(certs: Path, host: str, ca: Path) -> str:
    """A TLS connection over the loopback with the server's certificate: what the server said."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certs / "server.crt", certs / "server.key")
    client = ssl.create_default_context(cafile=ca)
    client.verify_flags |= ssl.VERIFY_X509_STRICT

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        try:
            with server.wrap_socket(connection, server_side=True) as secure:
                secure.sendall(b"hello")
        except (ssl.SSLError, OSError):
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname()) as plain,
                client.wrap_socket(plain, server_hostname=host) as secure,
            ):
                return secure.recv(10).decode()
        finally:
            thread.join()


def test_the_servers_certificate_holds_for_its_hosts_only(tmp_path: Path) -> None:
    certs, other = tmp_path / "certs", tmp_path / "other"
    make_certs(certs, ["link.example.org", "10.1.2.3", "::1"], [])
    make_certs(other, ["link.example.org"], [])
    for host in ("link.example.org", "10.1.2.3", "::1", "localhost", "127.0.0.1"):
        assert handshake(certs, host, certs / "ca.crt") == "hello"
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(certs, "example.org", certs / "ca.crt")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(certs, "link.example.org", other / "ca.crt")


def test_each_client_has_a_key_of_its_own(tmp_path: Path) -> None:
    made = make_certs(tmp_path, ["localhost"], ["VA Long Beach", "Cleveland"])
    private, public = client_key(tmp_path, "VA Long Beach")
    assert private.name == "va-long-beach"
    key = load_ssh_private_key(private.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(key.curve, ec.SECP384R1)
    assert load_ssh_public_key(public.read_bytes()) == key.public_key()
    assert public.read_bytes() != client_key(tmp_path, "Cleveland")[1].read_bytes()
    readable = {p.name for p in made.files if stat.S_IMODE(p.stat().st_mode) & 0o077}
    secret = {p.name for p in made.files} - readable
    assert secret == {"ca.key", "server.key", "va-long-beach", "cleveland"}
    for path in made.files:
        assert any(str(path) in note for note in made.notes)


def test_no_key_is_overwritten(tmp_path: Path) -> None:
    make_certs(tmp_path, ["localhost"], ["A"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for hosts, clients in ((["localhost"], []), ([], ["B", "A"])):
        with pytest.raises(InputError, match="is there already"):
            make_certs(tmp_path, hosts, clients)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    make_certs(tmp_path, [], ["B"])
    assert client_key(tmp_path, "B")[0].is_file()
    for hosts, clients in ((["https://a"], []), (["a:80"], []), ([], ["a b", "A-b"]), ([], ["!"])):
        with pytest.raises(InputError, match=r"--host|--client"):
            make_certs(tmp_path / "new", hosts, clients)


# --- processes ------------------------------------------------------------------------------------


def running(command: str) -> list[int]:
    return [entry.pid for entry in process_table() if entry.name.strip() == command]


def wait_for(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def test_the_supervisor_starts_again_until_it_is_stopped(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    said: list[str] = []
    script = f"echo x >> {lives}; test $(wc -l < {lives}) -ge 4 && sleep 971; exit 49"
    supervisor = Supervisor(shell(script), say=said.append, pause=0.01, attempts=9)
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    wait_for(lambda: running("sleep 971"))
    supervisor.stop()
    thread.join(timeout=30.0)
    assert not thread.is_alive()
    assert said == ["sh ended with code 49; it is started again in 0.01 s"] * 3
    assert running("sleep 971") == []


def test_the_supervisor_gives_up_with_the_last_words_and_leaves_no_child() -> None:
    said: list[str] = []
    script = "sleep 972 & echo no such table; exit 3"
    supervisor = Supervisor(shell(script), say=said.append, pause=0.01, attempts=3)
    assert supervisor.run() == 1
    assert len(said) == 4
    assert said[-2].startswith("sh ended with code 3, 3 times at once")
    assert said[-1] == "  no such table"
    assert running("sleep 972") == []


def test_lives_that_last_are_not_counted_as_failures() -> None:
    said: list[str] = []
    supervisor = Supervisor(shell("exit 1"), say=said.append, pause=0.0, quick=0.0, attempts=1)
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    wait_for(lambda: len(said) >= 3)
    supervisor.stop()
    thread.join(timeout=30.0)
    assert all("started again" in line for line in said)


SUPERVISED = """
from fedexact.deploy.supervise import Supervisor, supervise
script = "trap 'echo asked; exit 0' TERM; sleep 973 & wait"
raise SystemExit(supervise(Supervisor(["sh", "-c", script], say=print, echo=print)))
"""


@pytest.mark.parametrize("number", ["TERM", "INT", "HUP"])
def test_a_signal_to_the_supervisor_ends_everything(number: str) -> None:
    command = [sys.executable, "-c", SUPERVISED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        wait_for(lambda: running("sleep 973"))
        subprocess.run(["kill", f"-{number}", str(process.pid)], check=True)
        said = process.communicate(timeout=30.0)[0]
    assert process.returncode == 0
    assert said == "asked\n"
    assert running("sleep 973") == []


def test_a_child_in_a_session_of_its_own_is_ended_too(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "one.log"
    detached = (
        "import subprocess, time; print('up', flush=True);"
        "subprocess.Popen(['sleep', '974'], start_new_session=True); time.sleep(60)"
    )
    group = Group([sys.executable, "-c", detached], log=log)
    wait_for(lambda: running("sleep 974"))
    assert len(group.members()) == 2
    os.kill(group.pid, 9)  # the child has been seen: it is ended though its parent is gone
    group.end()
    assert running("sleep 974") == []
    assert group.last_lines() == ["up"]
    assert log.read_text() == "up\n"


def test_the_local_federation_reports_a_superlink_that_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "fake-link"
    fake.write_text("#!/bin/sh\nsleep 975 &\necho port taken\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(local, "executable", lambda name: str(fake))
    with (
        pytest.raises(local.ProcessError, match=r"SuperLink has ended[^Z]*port taken[^Z]*logs"),
        local.LocalFederation(tmp_path / "fed", {"A": {"client-id": "A"}}),
    ):
        pytest.fail("it did not start")
    assert running("sleep 975") == []


# --- the command ----------------------------------------------------------------------------------


def command(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["deploy", *(str(argument) for argument in arguments)])


def test_the_command_writes_an_app_and_keys(three: Path, tmp_path: Path) -> None:
    done = command("init", tmp_path / "app", three)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "app" / "pyproject.toml").is_file()
    done = command("certs", tmp_path / "keys", "--host", "localhost", "--client", "A")
    assert done.exit_code == 0, done.output
    assert "ca.key: nowhere" in done.output
    assert command("certs", tmp_path / "keys", "--client", "A").exit_code == 2
    assert command("certs", tmp_path / "keys").exit_code == 2


def test_a_node_writes_its_config_and_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "fake-node"
    fake.write_text('#!/bin/sh\necho "$@"\nexit 2\n')
    fake.chmod(0o755)
    monkeypatch.setattr(commands, "executable", lambda name: str(fake))
    monkeypatch.setattr(commands, "Supervisor", quickly)
    state = tmp_path / "state"
    arguments = ["--client-id", 'the "A"', "--data", "sqlite:///a.db", "--state-dir", str(state)]
    arguments += ["--query", "SELECT * FROM 't' WHERE x = \"y\"", "--superlink", "link:8000"]
    done = command("node", *arguments)
    assert done.exit_code == 1
    config_file = state / "node.toml"
    assert (
        f"--superlink link:8000 --port 9094 --node-config {config_file} --insecure" in done.output
    )

    assert parse_config_args([str(config_file)]) == {
        "client-id": 'the "A"',
        "state-dir": str(state),
        "data": "sqlite:///a.db",
        "query": "SELECT * FROM 't' WHERE x = \"y\"",
    }
    assert stat.S_IMODE(config_file.stat().st_mode) == 0o600
    assert command("node", *arguments, "--key", "k").exit_code == 2
    assert command("node", *arguments, "--oracle", "my:oracle").exit_code == 2


def quickly(command: list[str], **settings: Any) -> Supervisor:
    return Supervisor(command, **settings, pause=0.0, attempts=2)


def test_without_the_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    done = command("init", "somewhere")
    assert done.exit_code == 2
    assert 'pip install "fedexact[flower]"' in done.output


def test_the_command_line_does_not_import_flower() -> None:
    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); import fedexact.cli; "
        "print([m for m in sys.modules if m.split('.')[0] in ('flwr', 'cryptography', 'sqlalchemy')"
        " or m.startswith('fedexact.deploy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_pace_is_said_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    assert commands.pace(path) == "no round was run"
    path.write_text("".join(json.dumps({"seconds": s}) + "\n" for s in (9.0, 7.0, 60.0)))
    assert "9.0 s (median of 3)" in commands.pace(path)


# --- the rows at the sites ------------------------------------------------------------------------


PARTITIONED = (
    THREE_SITES.replace('client = "site"\n', 'partition = { name = "iid", clients = 3 }\n')
    .replace('features = ["age", "dose"]', 'features = ["age", "dose", "site"]')
    .replace("[0.9, 0.5, 0.7]", "0.5")
)


@pytest.mark.parametrize("text", [THREE_SITES, PARTITIONED], ids=["client", "partition"])
def test_the_files_of_the_sites_give_the_same_answer(three: Path, text: str) -> None:
    three.write_text(text.replace("fit_intercept", "weights = [3.0, 1.0, 2.0]\nfit_intercept"))
    asked = config.load(three)
    files, there = at_sites(asked, three.parent / "sites")
    assert all(path.is_file() for path in files.values())
    folder = {"sites": None, "folder": str(three.parent / "sites")}
    at_home = there.model_copy(update={"data": there.data.model_copy(update=folder)})
    before, after = config.prepare(asked), config.prepare(at_home)
    assert set(files) == set(before.data.names) == set(after.data.names)
    assert sorted(before.data.feature_names) == sorted(after.data.feature_names)
    assert before.reference is not None
    assert after.reference is not None
    np.testing.assert_allclose(after.reference, before.reference, rtol=1e-9)
    assert config.parse(tomllib.loads(there.to_toml())).deploy == there.deploy
    assert there.deploy is not None
    assert there.deploy.clients == list(files)


def test_raw_rows_keep_what_is_missing_and_lose_the_client(three: Path) -> None:
    files, _ = at_sites(config.load(three), three.parent / "sites")
    table = tables.read_parquet_table(files["A"])
    assert table.column_names == ["age", "dose", "y"]
    assert table.num_rows == 20
    assert table.column("dose").null_count > 0


def test_a_folder_is_used_as_it_is_and_sparse_rows_are_refused(tmp_path: Path) -> None:
    sites = tmp_path / "sites"
    sites.mkdir()
    for name in "AB":
        (sites / f"{name}.csv").write_text("age,y\n" + "1,0\n2,1\n3,1\n4,0\n" * 3)
    text = THREE_SITES.replace('csv = "table.csv"\nclient = "site"', 'folder = "sites"')
    text = text.replace('features = ["age", "dose"]\n', "").replace("[0.9, 0.5, 0.7]", "0.5")
    (tmp_path / "two.toml").write_text(text)
    asked = config.load(tmp_path / "two.toml")
    files, there = at_sites(asked, tmp_path / "new")
    assert files == {name: sites / f"{name}.csv" for name in "AB"}
    assert (there.data.sites, there.data.target) == ("rows", asked.data.target)
    pytest.importorskip("sklearn")
    (tmp_path / "rows.svm").write_text("".join(f"{i % 2} {i + 1}:1\n" for i in range(40)))
    sparse = '[data]\nlibsvm = "rows.svm"\npartition = { name = "iid", clients = 2 }\n'
    (tmp_path / "sparse.toml").write_text(sparse + text.split("standardize = true\n")[1])
    with pytest.raises(InputError, match="sparse; a site reads dense tables only"):
        at_sites(config.load(tmp_path / "sparse.toml"), tmp_path / "new")
