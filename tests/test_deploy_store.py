"""What lies on a site's disk: whole or refused, promoted or dropped as the server has counted."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedexact as fx
from fedexact.algorithms import ALGORITHMS
from fedexact.deploy import store
from fedexact.deploy.messages import FOREIGN, LOST, STALE, RefusedError
from fedexact.deploy.records import from_meta, to_meta
from fedexact.deploy.store import (
    NEVER,
    Counted,
    DamagedRecordError,
    Store,
    Version,
    locked,
    read_record,
    write_record,
)
from fedexact.errors import InputError
from fedexact.losses import LOSSES, Huber, Multinomial
from fedexact.regularizers import L1, OnCoordinates

NONE = Counted(NEVER)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a" / "some.state"


# --- records --------------------------------------------------------------------------------------

ARRAYS = {
    "x": np.array([1.5, -0.0, 5e-324]),
    "state/h": np.arange(6.0).reshape(2, 3),
    "n": np.array(7, np.int64),
    "bits": np.array([2**64 - 1], np.uint64),
    "none": np.zeros((0, 3)),
}


def test_a_record_is_read_as_it_was_written(path: Path) -> None:
    meta = {"client": "é/1 'x'", "round": 3, "list": [1, None, 0.1]}
    write_record(path, meta, ARRAYS)
    found = read_record(path)
    assert found is not None
    assert found[0] == meta
    assert found[1].keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[1][name].dtype == array.dtype
        assert found[1][name].shape == array.shape
        assert found[1][name].tobytes() == array.tobytes()


def test_no_file_is_no_record(path: Path) -> None:
    assert read_record(path) is None


def test_a_record_replaces_the_one_before_and_leaves_nothing_beside_it(path: Path) -> None:
    for n in range(3):
        write_record(path, {"n": n}, ARRAYS)
    found = read_record(path)
    assert found is not None
    assert found[0] == {"n": 2}
    assert [each.name for each in path.parent.iterdir()] == ["some.state"]


@pytest.mark.parametrize("kept", [0, 1, 15, 40, 85, 86, 90, 200, -1])
def test_a_torn_record_is_refused(path: Path, kept: int) -> None:
    write_record(path, {"n": 1}, ARRAYS)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DamagedRecordError, match=r"some\.state"):
        read_record(path)


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_a_flipped_bit_is_noticed(path: Path, at: float) -> None:
    write_record(path, {"n": 1}, ARRAYS)
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 4
    path.write_bytes(content)
    with pytest.raises(DamagedRecordError):
        read_record(path)


def test_something_behind_a_record_is_noticed(path: Path) -> None:
    write_record(path, {"n": 1}, ARRAYS)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DamagedRecordError, match="checksum"):
        read_record(path)


def test_a_record_of_another_format_is_refused_by_its_number(path: Path) -> None:
    write_record(path, {"n": 1}, ARRAYS)
    head, _, payload = path.read_bytes().partition(b"\n")
    path.write_bytes(head.replace(b" 1 ", b" 2 ") + b"\n" + payload)
    with pytest.raises(DamagedRecordError, match="has format 2, this version reads 1"):
        read_record(path)


def test_something_else_is_no_record(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"age,dose\n1,2\n")
    with pytest.raises(DamagedRecordError, match="not a record"):
        read_record(path)


@pytest.mark.parametrize("payload", [b"", b"PK\3\4 no archive", b"\x93NUMPY"])
def test_a_payload_that_is_no_archive_is_refused(path: Path, payload: bytes) -> None:
    path.parent.mkdir()
    head = f"{store.MAGIC} {store.FORMAT} {hashlib.sha256(payload).hexdigest()}\n"
    path.write_bytes(head.encode() + payload)
    with pytest.raises(DamagedRecordError):
        read_record(path)


def test_a_pickle_is_never_loaded(path: Path) -> None:
    with pytest.raises(ValueError, match="allow_pickle"):
        write_record(path, {}, {"x": np.array([object()])})
    assert not path.exists()


def test_a_disk_that_is_full_leaves_the_record_before(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(path, {"n": 1}, ARRAYS)

    def full(self: Path, content: bytes) -> int:
        self.open("wb").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write_record(path, {"n": 2}, ARRAYS)
    found = read_record(path)
    assert found is not None
    assert found[0] == {"n": 1}
    assert len(list(path.parent.iterdir())) == 1


# --- two versions ---------------------------------------------------------------------------------


class Here:
    """A store whose states are single numbers."""

    def __init__(self, folder: Path, client: str = "site") -> None:
        self.store = Store(folder, client)

    def open(self, round: int, counted: Counted, epoch: int = 0) -> float:
        version = self.store.open(epoch, round, counted, lambda: {"h": np.array(-1.0)})
        return float(version.arrays["h"])

    def put(self, round: int, h: float, epoch: int = 0, visit: str = "") -> None:
        self.store.put(Version(epoch, round, {"h": np.array(h)}, visit))

    def refused(self, round: int, counted: Counted, epoch: int = 0) -> tuple[str, str]:
        with pytest.raises(RefusedError) as refused:
            self.open(round, counted, epoch)
        return refused.value.code, refused.value.reason


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


def test_a_new_client_starts_from_the_initial_state(here: Here) -> None:
    assert here.open(12, NONE) == -1.0


def test_what_was_counted_is_promoted(here: Here) -> None:
    here.put(3, 30.0)
    assert here.open(4, Counted(3)) == 30.0
    here.put(4, 40.0)
    assert here.open(9, Counted(4)) == 40.0


def test_what_was_not_counted_is_dropped(here: Here) -> None:
    here.put(3, 30.0)
    here.open(4, Counted(3))
    here.put(4, 40.0)
    assert here.open(5, Counted(3)) == 30.0
    here.put(5, 50.0)
    assert here.open(6, Counted(3)) == 30.0
    assert here.open(6, Counted(5)) == 50.0


def test_a_first_visit_that_was_not_counted_leaves_the_initial_state(here: Here) -> None:
    here.put(3, 30.0)
    assert here.open(4, NONE) == -1.0


def test_a_message_that_comes_twice_starts_from_the_same_state(here: Here) -> None:
    here.put(3, 30.0)
    for _ in range(3):
        assert here.open(4, Counted(3)) == 30.0
        here.put(4, 40.0)


def test_a_client_that_was_away_for_long_goes_on_from_its_state(here: Here) -> None:
    here.put(3, 30.0)
    assert here.open(100_000, Counted(3)) == 30.0


@pytest.mark.parametrize("counted", [NONE, Counted(2), Counted(3)])
def test_an_old_message_changes_nothing(here: Here, counted: Counted) -> None:
    here.put(2, 20.0)
    here.open(4, Counted(2))
    here.put(4, 40.0)
    code, reason = here.refused(3, counted)
    assert code == STALE
    assert "'site'" in reason
    assert "round 4" in reason
    assert here.open(5, Counted(4)) == 40.0


def test_a_round_that_was_counted_is_not_done_again(here: Here) -> None:
    here.put(4, 40.0)
    here.open(5, Counted(4))
    assert here.refused(4, NONE)[0] == STALE


def test_the_order_of_epochs_goes_before_that_of_rounds(here: Here) -> None:
    here.put(9, 90.0)
    here.open(10, Counted(9))
    assert here.open(3, NONE, epoch=1) == -1.0
    here.put(3, 33.0, epoch=1)
    assert here.refused(50, Counted(9), epoch=0)[0] == STALE
    assert here.open(4, Counted(3), epoch=1) == 33.0
    assert here.refused(4, Counted(9), epoch=2)[0] == LOST


def test_an_empty_folder_is_told_where_something_was_counted(here: Here) -> None:
    code, reason = here.refused(4, Counted(3))
    assert code == LOST
    assert "'site' holds nothing" in reason
    assert "counted round 3" in reason


def test_a_backup_of_the_folder_is_told(here: Here) -> None:
    here.put(3, 30.0)
    here.open(4, Counted(3))
    here.put(4, 40.0)
    code, reason = here.refused(9, Counted(8))
    assert code == LOST
    assert "round 3 and round 4" in reason
    assert "counted round 8" in reason


def test_a_server_that_has_forgotten_all_is_told(here: Here) -> None:
    here.put(3, 30.0)
    here.open(4, Counted(3))
    assert here.refused(9, NONE)[0] == LOST


def test_an_older_checkpoint_is_told_or_harmless(here: Here) -> None:
    """The server counted 3, 5 and 7, and goes on from a checkpoint after 3 or after 5."""
    here.put(3, 30.0)
    here.open(5, Counted(3))
    here.put(5, 50.0)
    here.open(7, Counted(5))
    here.put(7, 70.0)
    assert here.refused(4, Counted(3))[0] == STALE
    assert here.refused(6, Counted(5))[0] == STALE
    assert here.refused(8, Counted(3))[0] == LOST
    assert here.open(8, Counted(5)) == 50.0


def test_two_servers_that_number_their_rounds_alike_are_told_apart(here: Here) -> None:
    here.put(3, 30.0, visit="a")
    here.put(3, 31.0, visit="b")
    assert here.refused(4, Counted(3, "a"))[0] == LOST
    assert here.open(4, Counted(3, "b")) == 31.0
    assert here.refused(5, Counted(3, "a"))[0] == LOST
    assert here.open(5, Counted(3, "b")) == 31.0


@pytest.mark.parametrize(("which", "fine"), [("pending", False), ("committed", True)])
def test_a_torn_version_is_told_if_it_is_needed(here: Here, which: str, fine: bool) -> None:
    here.put(3, 30.0)
    here.open(4, Counted(3))
    here.put(4, 40.0)
    path = here.store.folder / f"{which}.state"
    path.write_bytes(path.read_bytes()[:-5])
    if fine:
        assert here.open(5, Counted(4)) == 40.0
    else:
        code, reason = here.refused(5, Counted(4))
        assert code == LOST
        assert "damaged" in reason
        assert here.open(5, Counted(3)) == 30.0


def test_the_folder_of_another_client_is_refused(here: Here) -> None:
    here.put(3, 30.0)
    code, reason = Here(here.store.folder, "other").refused(4, Counted(3))
    assert code == FOREIGN
    assert "'other' is that of 'site'" in reason
    assert here.open(4, Counted(3)) == 30.0


def test_a_folder_can_be_locked_by_one(tmp_path: Path) -> None:
    with locked(tmp_path / "new"), pytest.raises(BlockingIOError), locked(tmp_path / "new", False):
        pass
    with locked(tmp_path / "new", False):
        pass


def test_every_order_of_lost_replies_gives_the_counted_state(tmp_path: Path) -> None:
    """The state after each sequence of 7 visits, counted or not, is the sum of those counted."""
    for case in range(2**7):
        here, counted, total = Here(tmp_path / str(case)), NONE, 0.0
        for round in range(7):
            h = here.open(round, counted)
            assert h == (total if counted != NONE else -1.0)
            new = total + 10.0**round
            here.put(round, new, visit=str(round))
            if case >> round & 1:
                counted, total = Counted(round, str(round)), new


# --- algorithms and losses as JSON ----------------------------------------------------------------

RECORDS: list[Any] = [
    *(cls() for cls in ALGORITHMS.values()),
    fx.FOCUS(lr=0.1 + 0.2),
    fx.SCAFFOLD(lr=1e-300, batch_size=5, option=2),
    fx.Anderson(inner=fx.FedDR(step=0.1), memory=2),
    *(cls() for name, cls in LOSSES.items() if name != "multinomial"),
    Multinomial(4),
    Huber(0.1),
    L1(0.3),
    OnCoordinates(L1(1 / 3), (1, 2, 5)),
]


@pytest.mark.parametrize("value", RECORDS, ids=lambda value: type(value).__name__)
def test_a_record_travels_without_a_changed_bit(value: Any) -> None:
    back = from_meta(json.loads(json.dumps(to_meta(value))))
    assert type(back) is type(value)
    assert back == value


def test_arrays_travel_without_a_changed_bit() -> None:
    for array in (np.array([1 / 3, 5e-324]), np.array(7, np.int32), np.array([0.1], np.float32)):
        back = from_meta(json.loads(json.dumps(to_meta(array))))
        assert back.dtype == array.dtype
        assert back.tobytes() == array.tobytes()
    assert from_meta(to_meta(jnp.asarray(1 / 3))) == 1 / 3
    assert from_meta(json.loads(json.dumps(to_meta((1, (2, "a"), None))))) == (1, (2, "a"), None)


def test_a_class_of_the_same_name_is_not_sent() -> None:
    @dataclasses.dataclass(frozen=True)
    class Huber:
        delta: float = 1.0

    for value in (Huber(), object(), {"a": 1}):
        with pytest.raises(InputError, match="cannot be sent to the sites"):
            to_meta(value)


@pytest.mark.parametrize(
    "meta",
    [
        {"record": "FedNova"},
        {"record": "FOCUS", "momentum": 0.9},
        {"lr": 1.0},
    ],
)
def test_a_record_of_another_version_is_refused(meta: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="same version"):
        from_meta(meta)
