"""Secure summation: the fixed point against fractions, exact sums, noise without the partners."""

from __future__ import annotations

import hashlib
import json
import math
import stat
import sys
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from fedexact import files
from fedexact.deploy import secure
from fedexact.deploy.secure import Announcement, announce, fixed_point, from_fixed_point, masked
from fedexact.errors import InputError

MODULUS = 2**256
UNIT = Fraction(1, 2**secure.FRACTION)
SMALLEST_NORMAL = sys.float_info.min
SITES = ("berlin", "lyon", "oslo", "porto", "turin", "zagreb")
CONTEXT = b"run-7/0/12/0123456789abcdef"


def key_of(client: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(client.encode().ljust(32, b"."))


def announcement_of(members: tuple[str, ...] = SITES[:3], context: bytes = CONTEXT) -> Announcement:
    return Announcement(members, {c: secure.public_bytes(key_of(c)) for c in members}, context)


def uploads_of(
    values: Mapping[str, np.ndarray], announcement: Announcement
) -> dict[str, np.ndarray]:
    return {c: masked(v, c, key_of(c), announcement) for c, v in values.items()}


def summed(values: Mapping[str, np.ndarray], announcement: Announcement) -> np.ndarray:
    return secure.unmasked_sum(uploads_of(values, announcement), announcement)


def integers(limbs: np.ndarray) -> list[int]:
    """The unsigned integers that the limbs stand for."""
    return [sum(int(limb) << (64 * j) for j, limb in enumerate(row)) for row in limbs]


def limbs_of(numbers: list[int]) -> np.ndarray:
    rows = [[n % MODULUS >> (64 * j) & (2**64 - 1) for j in range(4)] for n in numbers]
    return np.array(rows, np.uint64)


def signed(n: int) -> int:
    return n - MODULUS if n >> 255 else n


def nearest(value: float) -> int:
    """In units of 2^-128, ties to even."""
    return round(Fraction(value) / UNIT)


def largest(members: int) -> float:
    return math.nextafter(2.0**secure.RANGE / members, 0)


def floats(limit: float = 1e30) -> st.SearchStrategy[float]:
    return st.floats(-limit, limit, allow_subnormal=True)


# --- the format -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "limbs"),
    [
        (0.0, [0, 0, 0, 0]),
        (-0.0, [0, 0, 0, 0]),
        (1.0, [0, 0, 1, 0]),
        (-1.0, [0, 0, 2**64 - 1, 2**64 - 1]),
        (0.5, [0, 2**63, 0, 0]),
        (-0.5, [0, 2**63, 2**64 - 1, 2**64 - 1]),
        (2.0**64, [0, 0, 0, 1]),
        (2.0**-128, [1, 0, 0, 0]),
        (-(2.0**-128), [2**64 - 1] * 4),
        (1.5 * 2.0**-64, [2**63, 1, 0, 0]),
        (2.0**-129, [0, 0, 0, 0]),  # a tie goes to the even neighbour
        (3 * 2.0**-129, [2, 0, 0, 0]),
        (math.nextafter(2.0**-129, 1), [1, 0, 0, 0]),
        (SMALLEST_NORMAL, [0, 0, 0, 0]),
        (-math.ulp(0.0), [0, 0, 0, 0]),  # the smallest subnormal
    ],
)
def test_fixed_point_of_known_values(value: float, limbs: list[int]) -> None:
    got = fixed_point(np.array([value]), 2)
    assert got.dtype == np.uint64
    assert got.tolist() == [limbs]


@given(st.lists(floats() | floats(1e-30) | floats(1e-300), max_size=20))
def test_fixed_point_is_the_nearest_multiple_of_the_unit(values: list[float]) -> None:
    got = integers(fixed_point(np.array(values, float), 3))
    assert [signed(n) for n in got] == [nearest(v) for v in values]


def test_every_exponent_in_the_range() -> None:
    mantissas = np.array([1.0, 2 - 2.0**-52, 1 + 2.0**-52, -1.0, -(2 - 2.0**-52)])
    values = np.ldexp(mantissas[None, :], np.arange(-130, secure.RANGE)[:, None]).ravel()
    values = values[np.abs(values) <= largest(1)]
    limbs = fixed_point(values, 1)
    assert [signed(n) for n in integers(limbs)] == [nearest(v) for v in values.tolist()]
    exact = np.abs(values) >= 2.0**-76
    assert np.array_equal(from_fixed_point(limbs)[exact], values[exact])


@given(st.lists(floats(), max_size=20))
def test_values_above_the_resolution_come_back_as_they_were(values: list[float]) -> None:
    kept = np.array([v if abs(v) >= 2.0**-76 else 0.0 for v in values])
    assert np.array_equal(from_fixed_point(fixed_point(kept, 2)), kept)


@given(floats(2.0**-76))
def test_values_below_the_resolution_move_by_half_a_unit_at_most(value: float) -> None:
    back = from_fixed_point(fixed_point(np.array([value]), 2)).item()
    assert abs(Fraction(back) - Fraction(value)) <= UNIT / 2


@given(st.lists(st.integers(-(2**255), 2**255 - 1) | st.integers(-(2**70), 2**70), min_size=1))
def test_the_way_back_is_correctly_rounded(numbers: list[int]) -> None:
    # The division of two Python ints is correctly rounded.
    assert from_fixed_point(limbs_of(numbers)).tolist() == [n / 2**128 for n in numbers]


@pytest.mark.parametrize("position", [53, 54, 63, 64, 65, 117, 118, 127, 128, 129, 192, 200, 254])
def test_the_way_back_rounds_ties_to_even(position: int) -> None:
    half = 2 ** (position - 53)
    near = [2**position + s * half + d for s in (-1, 1, 3, 5) for d in (-1, 0, 1)]
    numbers = [*near, *(-n for n in near)]
    assert from_fixed_point(limbs_of(numbers)).tolist() == [n / 2**128 for n in numbers]


def test_the_ends_of_the_integers_and_limbs() -> None:
    limbs = [2 ** (64 * j) - d for j in (1, 2, 3) for d in (1, 2**10, 2**11)]
    ends = [0, 1, -1, 2**255 - 1, -(2**255), *limbs, *(-n for n in limbs)]
    assert from_fixed_point(limbs_of(ends)).tolist() == [n / 2**128 for n in ends]


unsigned = st.integers(0, MODULUS - 1) | st.sampled_from([0, 1, 2**64 - 1, 2**64, MODULUS - 1])


@given(st.lists(st.tuples(unsigned, unsigned), max_size=20))
def test_add_carries_and_wraps(pairs: list[tuple[int, int]]) -> None:
    a, b = (limbs_of([p[i] for p in pairs]).reshape(-1, secure.LIMBS) for i in (0, 1))
    assert integers(secure.add(a, b)) == [(x + y) % MODULUS for x, y in pairs]


def test_a_carry_through_all_limbs() -> None:
    total = secure.add(limbs_of([2**192 - 1, MODULUS - 1]), limbs_of([1, 1]))
    assert total.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(InputError, match=rf"value 1 is {bad:g}; with 2 members"):
        fixed_point(np.array([1.0, bad]), 2)


@pytest.mark.parametrize("members", [2, 3, 7, 1000])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_border_of_the_range(members: int, sign: int) -> None:
    border = sign * largest(members)
    total = fixed_point(np.array([border]), members)
    assert abs(members * signed(integers(total)[0])) < 2 ** (secure.RANGE + secure.FRACTION)
    beyond = math.nextafter(border, sign * math.inf)
    with pytest.raises(InputError, match=r"value 2 is .*e\+.* at most " + f"{abs(border)!r}"[:8]):
        fixed_point(np.array([0.0, border, beyond]), members)


@pytest.mark.parametrize(
    "values", [np.zeros((2, 2)), np.zeros(2, np.float32), np.zeros(2, np.int64), np.array(1.0)]
)
def test_only_vectors_of_float64(values: np.ndarray) -> None:
    with pytest.raises(InputError, match=f"got {values.dtype} of shape"):
        fixed_point(values, 2)


def test_the_number_of_members_is_checked() -> None:
    with pytest.raises(InputError, match="members must be an integer >= 1, got 0"):
        fixed_point(np.ones(1), 0)


# --- sums -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [2, 3, 6])
def test_the_sum_equals_fsum_to_the_last_bit(members: int) -> None:
    rng = np.random.default_rng(members)
    sites = SITES[:members]
    values = {c: rng.normal(size=500) * 10.0 ** rng.integers(-6, 6, 500) for c in sites}
    expected = [math.fsum(column) for column in zip(*values.values(), strict=True)]
    assert summed(values, announcement_of(sites)).tolist() == expected


def test_the_sum_is_exact_where_float64_cancels() -> None:
    values = {"berlin": np.array([1e20]), "lyon": np.array([1e-20]), "oslo": np.array([-1e20])}
    assert summed(values, announcement_of()).tolist() == [1e-20]
    assert sum(v.item() for v in values.values()) == 0


def test_the_sum_equals_the_plain_one_over_forty_decades() -> None:
    rng = np.random.default_rng(1)
    values = {c: 10.0 ** rng.uniform(-20, 20, 2000) for c in SITES}
    plain = np.sum(list(values.values()), axis=0)
    np.testing.assert_allclose(summed(values, announcement_of(SITES)), plain, rtol=1e-12, atol=0)


@given(st.lists(st.tuples(floats(), floats(), floats() | floats(1e-36)), max_size=10))
def test_the_sum_is_that_of_the_rounded_fractions(rows: list[tuple[float, float, float]]) -> None:
    columns = np.array(rows, float).reshape(-1, 3).T
    got = summed(dict(zip(SITES[:3], columns, strict=True)), announcement_of())
    assert got.tolist() == [sum(nearest(v) for v in row) / 2**128 for row in rows]


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_at_the_border_do_not_overflow(sign: int) -> None:
    border = sign * largest(3)
    values = {c: np.array([border, 0.0]) for c in SITES[:3]}
    assert summed(values, announcement_of()).tolist() == [math.fsum([border] * 3), 0.0]


def test_a_site_refuses_what_might_overflow() -> None:
    with pytest.raises(InputError, match="value 0 is 1e"):
        masked(np.array([1e33]), "oslo", key_of("oslo"), announcement_of())


def test_no_values() -> None:
    assert summed({c: np.zeros(0) for c in SITES[:3]}, announcement_of()).shape == (0,)


def test_the_order_of_members_and_uploads_does_not_matter() -> None:
    values = {c: np.random.default_rng(i).normal(size=20) for i, c in enumerate(SITES[:4])}
    ahead, back = announcement_of(SITES[:4]), announcement_of(SITES[3::-1])
    assert ahead.members != back.members
    total = summed(values, ahead)
    assert np.array_equal(total, summed(values, back))
    uploads = uploads_of(values, ahead)
    turned = dict(reversed(uploads.items()))
    assert np.array_equal(total, secure.unmasked_sum(turned, back))
    for client, upload in uploads_of(values, back).items():
        assert np.array_equal(upload, uploads[client])


def test_the_same_values_under_other_ids_give_the_same_sum() -> None:
    columns = np.random.default_rng(5).normal(size=(3, 20))
    totals = [
        summed(dict(zip(ids, columns, strict=True)), announcement_of(tuple(sorted(ids))))
        for ids in (SITES[:3], SITES[2::-1], SITES[3:])
    ]
    assert np.array_equal(totals[0], totals[1])
    assert np.array_equal(totals[0], totals[2])


# --- what the server sees -------------------------------------------------------------------------

LENGTH = 4096
LOW = 1e-4  # p-value; keys and contexts are fixed, so that the outcome is too


def p_value(outcome: Any) -> float:
    return float(outcome.pvalue)


def evenness(limbs: np.ndarray) -> float:
    """The smallest p-value of tests that the bytes and the limbs are uniform."""
    counts = np.bincount(np.frombuffer(limbs.tobytes(), np.uint8), minlength=256)
    limb_wise = [p_value(scipy.stats.kstest(column / 2.0**64, "uniform")) for column in limbs.T]
    return min(p_value(scipy.stats.chisquare(counts)), *limb_wise)


def dependence(limbs: np.ndarray, others: np.ndarray) -> float:
    """The smallest p-value of tests that columns of `limbs` and of `others` are uncorrelated."""
    tests = [
        p_value(scipy.stats.pearsonr(a.astype(float), b.astype(float)))
        for a in limbs.T
        for b in others.reshape(len(others), -1).T
    ]
    return min(tests)


VECTORS = {
    "zeros": np.zeros(LENGTH),
    "large": np.full(LENGTH, 1e30),
    "ramp": np.linspace(-1e3, 1e3, LENGTH),
}


@pytest.mark.parametrize("name", VECTORS)
def test_one_upload_is_noise_and_the_sum_exact(name: str) -> None:
    mine = VECTORS[name]
    others = {c: np.random.default_rng(i).normal(size=LENGTH) for i, c in enumerate(SITES[:2])}
    values = {**others, "oslo": mine}
    uploads = uploads_of(values, announcement_of())
    upload = uploads["oslo"]
    assert evenness(upload) > LOW
    assert dependence(upload[1:], upload[:-1]) > LOW
    assert dependence(upload, VECTORS["ramp"]) > LOW
    for partner in others:
        assert dependence(upload, uploads[partner]) > LOW
        assert evenness(secure.add(upload, uploads[partner])) > LOW  # one member is still missing
    expected = [math.fsum(column) for column in zip(*values.values(), strict=True)]
    assert secure.unmasked_sum(uploads, announcement_of()).tolist() == expected


@pytest.mark.parametrize("name", VECTORS)
def test_without_masks_the_same_tests_see_the_values(name: str) -> None:
    assert evenness(fixed_point(VECTORS[name], 3)) < 1e-30


def test_without_masks_the_ramp_is_seen_in_its_upload() -> None:
    limbs = fixed_point(VECTORS["ramp"], 3)
    assert dependence(limbs[:, 2:3], VECTORS["ramp"]) < 1e-30


def test_uploads_of_very_different_vectors_are_alike() -> None:
    contexts = (CONTEXT, CONTEXT[::-1])
    zeros, large = (
        masked(VECTORS[name], "oslo", key_of("oslo"), announcement_of(context=context))
        for name, context in zip(("zeros", "large"), contexts, strict=True)
    )
    for column, other in zip(zeros.T, large.T, strict=True):
        assert p_value(scipy.stats.ks_2samp(column.astype(float), other.astype(float))) > LOW
    assert dependence(zeros, large) > LOW


def test_a_fresh_context_gives_unrelated_masks() -> None:
    keys = {c: secure.public_bytes(key_of(c)) for c in SITES[:3]}
    first, second = announcement_of(), announcement_of(context=CONTEXT[:-1] + b"g")
    masks = [masked(VECTORS["zeros"], "oslo", key_of("oslo"), a) for a in (first, second)]
    assert evenness(secure.add(masks[0], ~masks[1])) > LOW
    assert dependence(masks[0], masks[1]) > LOW
    again, later = (announce(keys, "run-7", 0, 12) for _ in range(2))
    assert again.context != later.context
    assert again.context.startswith(b"run-7/0/12/")
    assert len(again.context) == len(b"run-7/0/12/") + 16


def test_a_context_used_twice_would_give_away_the_difference() -> None:
    one, other = (masked(VECTORS[n], "oslo", key_of("oslo"), announcement_of())
                  for n in ("zeros", "large"))  # fmt: skip
    difference = secure.add(secure.add(other, ~one), limbs_of([1] * LENGTH))
    assert np.array_equal(from_fixed_point(difference), VECTORS["large"])


def test_a_late_upload_and_the_repeated_sum_give_away_one_member() -> None:
    values = {c: np.array([3.0 + i, -0.5]) for i, c in enumerate(SITES[:3])}
    first = summed(values, announcement_of())
    rest = ("berlin", "lyon")
    repeated = summed({c: values[c] for c in rest}, announcement_of(rest, CONTEXT[::-1]))
    assert np.array_equal(first - repeated, values["oslo"])


def test_masks_depend_on_the_members_and_on_all_keys() -> None:
    mine = key_of("oslo")
    zeros = np.zeros(LENGTH)
    two = announcement_of(("lyon", "oslo"))
    wider = announcement_of(("lyon", "oslo", "zagreb"))
    with_third = masked(zeros, "oslo", mine, wider)
    third = secure.add(with_third, ~masked(zeros, "oslo", mine, two))
    changed = wider._replace(keys={**wider.keys, "zagreb": secure.public_bytes(key_of("turin"))})
    assert evenness(third) > LOW
    assert evenness(secure.add(with_third, ~masked(zeros, "oslo", mine, changed))) > LOW


def test_the_streams_follow_the_description() -> None:
    def sized(*parts: bytes) -> bytes:
        return b"".join(len(part).to_bytes(8, "big") + part for part in parts)

    announcement = announcement_of()
    keys = announcement.keys
    roll = hashlib.sha256(
        sized(*(sized(c.encode(), keys[c]) for c in ("berlin", "lyon", "oslo")))
    ).digest()

    def stream(a: str, b: str) -> list[int]:
        names, publics = (a.encode(), b.encode()), (keys[a], keys[b])
        info = sized(b"fedexact secure sum 1", *names, *publics, roll)
        shared = key_of(a).exchange(key_of(b).public_key())
        secret = HKDF(SHA256(), 32, salt=CONTEXT, info=info).derive(shared)
        bits = Cipher(ChaCha20(secret, bytes(16)), None).encryptor().update(bytes(64))
        return [int.from_bytes(bits[i : i + 32], "little") for i in (0, 32)]

    upload = masked(np.array([1.0, -2.0]), "lyon", key_of("lyon"), announcement)
    plus, minus = stream("lyon", "oslo"), stream("berlin", "lyon")
    expected = [
        (value * 2**128 + p - q) % MODULUS for value, p, q in zip((1, -2), plus, minus, strict=True)
    ]
    assert integers(upload) == expected


def test_masks_of_two_members_are_opposite() -> None:
    pair = announcement_of(("lyon", "oslo"))
    masks = [masked(np.zeros(5), c, key_of(c), pair) for c in pair.members]
    assert np.all(masks[0].any(axis=1))
    assert not secure.add(*masks).any()


# --- what is refused ------------------------------------------------------------------------------


def test_a_missing_member_is_named_and_the_rest_repeats_the_round() -> None:
    values = {c: np.array([1.0, -2.0]) for c in SITES[:4]}
    uploads = uploads_of(values, announcement_of(SITES[:4]))
    del uploads["oslo"]
    with pytest.raises(InputError, match=r"missing from \['oslo'\].*repeat the round"):
        secure.unmasked_sum(uploads, announcement_of(SITES[:4]))
    rest = tuple(uploads)
    again = announce(announcement_of(rest).keys, "run-7", 0, 12)
    assert summed({c: values[c] for c in rest}, again).tolist() == [3.0, -6.0]


def test_uploads_of_others_are_refused() -> None:
    uploads = uploads_of({c: np.ones(2) for c in SITES[:3]}, announcement_of())
    uploads["turin"] = uploads["oslo"]
    with pytest.raises(InputError, match=r"not expected from \['turin'\]"):
        secure.unmasked_sum(uploads, announcement_of())


@pytest.mark.parametrize(
    ("upload", "message"),
    [
        (np.zeros((2, 4)), "'lyon': its upload is float64 of shape"),
        (np.zeros((2, 4), np.uint32), "'lyon': its upload is uint32 of shape"),
        (np.zeros((2, 3), np.uint64), r"'lyon': its upload is uint64 of shape \(2, 3\)"),
        (np.zeros(8, np.uint64), r"'lyon': its upload is uint64 of shape \(8,\)"),
        (np.zeros((), np.uint64), r"'lyon': its upload is uint64 of shape \(\)"),
        (np.zeros((3, 4), np.uint64), "'lyon': its upload has 3 values, that of 'berlin' has 2"),
    ],
)
def test_uploads_of_another_form_are_refused(upload: np.ndarray, message: str) -> None:
    uploads = uploads_of({c: np.ones(2) for c in SITES[:3]}, announcement_of())
    uploads["lyon"] = upload
    with pytest.raises(InputError, match=message):
        secure.unmasked_sum(uploads, announcement_of())


def test_masks_that_do_not_cancel_are_noticed() -> None:
    values = {c: np.ones(5) for c in SITES[:3]}
    uploads = uploads_of(values, announcement_of())
    other = announcement_of(context=CONTEXT[::-1])
    uploads["oslo"] = masked(values["oslo"], "oslo", key_of("oslo"), other)
    with pytest.raises(InputError, match=r"the masks do not cancel \(value 0, 5 in all\)"):
        secure.unmasked_sum(uploads, announcement_of())


def test_a_public_key_changed_on_the_way_is_noticed() -> None:
    values = {c: np.ones(5) for c in SITES[:3]}
    true = announcement_of()
    changed = true._replace(keys={**true.keys, "lyon": secure.public_bytes(key_of("turin"))})
    uploads = uploads_of(values, true)
    uploads["oslo"] = masked(values["oslo"], "oslo", key_of("oslo"), changed)
    with pytest.raises(InputError, match="the masks do not cancel"):
        secure.unmasked_sum(uploads, true)


def test_a_site_that_is_not_a_member_refuses() -> None:
    with pytest.raises(InputError, match="'turin': is not among the members"):
        masked(np.ones(1), "turin", key_of("turin"), announcement_of())


def test_a_site_refuses_a_key_that_is_not_its_own() -> None:
    with pytest.raises(InputError, match="'oslo': the announced public key is not its own"):
        masked(np.ones(1), "oslo", key_of("turin"), announcement_of())


LOW_ORDER = [
    bytes(32),
    (1).to_bytes(32, "little"),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    (2**255 - 20).to_bytes(32, "little"),  # p - 1
]


@pytest.mark.parametrize("point", LOW_ORDER)
def test_points_of_low_order_are_refused(point: bytes) -> None:
    true = announcement_of()
    bad = true._replace(keys={**true.keys, "lyon": point})
    with pytest.raises(InputError, match=f"'lyon': its public key {point.hex()} gives no shared"):
        masked(np.ones(1), "oslo", key_of("oslo"), bad)


def test_announcements_that_cannot_be_used_are_refused() -> None:
    true = announcement_of()
    lyon = true.keys["lyon"]
    cases = [
        (announcement_of(("oslo",)), r"at least 2 members, got \['oslo'\]"),
        (announcement_of(()), r"at least 2 members, got \[\]"),
        (true._replace(members=(*true.members, "oslo")), "a member is named twice"),
        (true._replace(members=true.members[1:]), "there are keys of"),
        (true._replace(keys={**true.keys, "lyon": lyon[:-1]}), "'lyon': its public key has 31"),
        (true._replace(keys={**true.keys, "berlin": lyon}), "'berlin' and 'lyon' have the same"),
        (true._replace(context=b"short"), "the context has 5 bytes"),
    ]
    for announcement, message in cases:
        with pytest.raises(InputError, match=message):
            masked(np.ones(1), "oslo", key_of("oslo"), announcement)
        with pytest.raises(InputError, match=message):
            secure.unmasked_sum({}, announcement)


# --- announcements and keys -----------------------------------------------------------------------


def test_an_announcement_goes_through_json() -> None:
    announcement = announce(announcement_of(SITES[2::-1]).keys, "run-7", 1, 3)
    assert announcement.members == SITES[:3]
    assert Announcement.from_meta(json.loads(json.dumps(announcement.to_meta()))) == announcement


def test_members_are_sorted_on_arrival() -> None:
    meta = announcement_of().to_meta()
    meta["members"] = meta["members"][::-1]
    assert Announcement.from_meta(meta) == announcement_of()


@pytest.mark.parametrize(
    "change",
    [
        {"members": "oslo"},
        {"members": [1, 2]},
        {"members": None},
        {"keys": ["00"]},
        {"keys": {"oslo": "no hex"}},
        {"keys": {"oslo": 5}},
        {"context": "0g"},
        {"context": None},
    ],
)
def test_announcements_that_cannot_be_read_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(InputError, match="announcement of a secure sum: cannot be read"):
        Announcement.from_meta({**announcement_of().to_meta(), **change})


def test_an_empty_announcement_is_refused() -> None:
    with pytest.raises(InputError, match=r"cannot be read \(KeyError\('keys'\)\)"):
        Announcement.from_meta({})


def test_from_meta_checks_what_it_reads() -> None:
    with pytest.raises(InputError, match="at least 2 members"):
        Announcement.from_meta(announcement_of(("oslo",)).to_meta())


def test_the_key_is_made_once_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    key = secure.private_key(folder)
    public = secure.public_bytes(key)
    assert len(public) == 32
    assert secure.public_bytes(secure.private_key(folder)) == public
    assert secure.public_bytes(secure.private_key(tmp_path / "other")) != public
    assert [p.name for p in folder.iterdir()] == ["secure-key"]


@pytest.mark.skipif(sys.platform == "win32", reason="no such modes")
def test_only_the_owner_may_read_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    flush = files._flush
    monkeypatch.setattr(files, "_flush", lambda p: (modes.append(p.stat().st_mode), flush(p)))
    secure.private_key(tmp_path)
    modes.append((tmp_path / "secure-key").stat().st_mode)
    assert [stat.S_IMODE(mode) for mode in modes] == [0o600, 0o600]


@pytest.mark.parametrize("damage", ["empty", "torn", "flipped", "longer", "binary"])
def test_a_damaged_key_is_refused(tmp_path: Path, damage: str) -> None:
    secure.private_key(tmp_path)
    path = tmp_path / "secure-key"
    content = path.read_bytes()
    middle = len(content) // 2
    digit = b"0" if content[middle : middle + 1] != b"0" else b"1"
    path.write_bytes(
        {
            "empty": b"",
            "torn": content[:-3],
            "flipped": content[:middle] + digit + content[middle + 1 :],
            "longer": content + b"\n",
            "binary": b"\xff\xfe \xff\xfe",
        }[damage]
    )
    with pytest.raises(InputError, match=r"secure-key: the site's key is damaged; remove the file"):
        secure.private_key(tmp_path)


def test_a_key_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secure-key").mkdir()
    with pytest.raises(InputError, match="secure-key: the site's key cannot be read"):
        secure.private_key(tmp_path)


def test_a_full_disk_leaves_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_flush", full)
    with pytest.raises(OSError, match="No space left"):
        secure.private_key(tmp_path)
    assert not list(tmp_path.iterdir())
