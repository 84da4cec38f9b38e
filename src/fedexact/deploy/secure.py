"""Secure summation: the server learns the sum of the uploads of a round and no single one.

Each pair of members of the round shares a stream of random bits, which one of the two adds to its
upload and the other subtracts. In the sum over all members the streams cancel. In any smaller part
of it some are left, and to whoever has neither private key of such a pair they are noise.

What it protects against: a server that is honest but curious. It follows the protocol and relays
the public keys as they are, and looks at whatever passes through it. It must not collude with all
other members of the round: those together can always subtract their own uploads from the sum. A
server that lies (hands out keys of its own, names members that do not exist, uses a context twice)
is outside of this model. The server still learns the sums, who takes part, and how long the vectors
are. With two members each can compute the other's upload from the published sum. The keys of the
sites do not change: who steals a site's key can unmask its uploads recorded earlier.

A member that drops out makes the sum useless. The round is then repeated with the others, under a
fresh announcement. If the upload that was given up comes in late after all, it completes the first
sum, and the first sum less the repeated one is the upload of that member: the server must drop late
uploads unread, and a server that does not can learn this one. In the same way sums over different
members tell their difference where the uploads hardly change from round to round. A site must never
mask two different vectors under one context, as their difference would be seen.

The stream of a pair: X25519 of the two static keys, then HKDF-SHA256 (salt: the context of the
announcement; info: both ids, both public keys, a hash of the list of members and keys) to a key of
ChaCha20. The context is fresh, so that no stream is used twice.

The numbers: an upload is a signed integer of 256 bits for each value, in units of 2^-128 (2.9e-39),
two's complement, four limbs of 64 bits with the lowest first: 32 bytes a value. A float64 of
magnitude 2^-76 (1.3e-23) or more is converted exactly; a smaller one is rounded to the nearest
multiple of the unit, ties to even, which moves it by at most 2^-129 (1.5e-39). Integers are added
without error and the sum is rounded once, so it is the correctly rounded sum of the values, in
whatever order they come, except that values below 1.3e-23 may move it by 1.5e-39 each. The sum
stays below 2^111 (2.6e33) in magnitude; a value above 2^111 / members is refused before anything is
sent. The 16 bits above are a check: if the masks do not cancel, a value of the sum passes it with
probability 2^-16, and a vector of sums practically never.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedexact.errors import InputError, check_count
from fedexact.files import atomic_path

LEAST = 2  # members of a round
LIMBS = 4  # of 64 bits
FRACTION = 128  # bits below the point
RANGE = 111  # the sum is below 2^RANGE in magnitude
KEY_FILE = "secure-key"

_KEY_BYTES = 32
_FRESH_BYTES = 16
_LABEL = b"fedexact secure sum 1"
_KEY_LABEL = b"fedexact-secure-key-1"
_AGAIN = "remove that site's file 'secure-key' and start the federation again: it makes a new key"


class Announcement(NamedTuple):
    """Who takes part in a masked round: the server sends it to all members before they answer.

    `context` is the run, epoch and round and 16 random bytes that are drawn for every attempt; see
    `announce`.
    """

    members: tuple[str, ...]  # client ids, sorted
    keys: Mapping[str, bytes]  # public key of each member
    context: bytes

    def to_meta(self) -> dict[str, Any]:
        """As a dict fit for JSON."""
        return {
            "members": list(self.members),
            "keys": {client: self.keys[client].hex() for client in self.members},
            "context": self.context.hex(),
        }

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Announcement:
        """The inverse of `to_meta`; raises InputError for what cannot be read or used."""
        try:
            keys = {client: bytes.fromhex(key) for client, key in meta["keys"].items()}
            members = tuple(sorted(_words(meta["members"])))
            context = bytes.fromhex(meta["context"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"announcement of a secure sum: cannot be read ({error!r}); server and sites must "
                "use the same version of fedexact"
            ) from error
        announcement = cls(members, keys, context)
        announcement.check()
        return announcement

    def check(self) -> None:
        """Raises InputError unless members, keys and context can be used."""
        if len(self.members) < LEAST:
            raise InputError(
                f"secure sum: needs at least {LEAST} members, got {list(self.members)}; a sum over "
                "one member is its upload"
            )
        if len(set(self.members)) < len(self.members):
            raise InputError(f"secure sum: a member is named twice in {list(self.members)}")
        if set(self.keys) != set(self.members):
            raise InputError(
                f"secure sum: there are keys of {sorted(self.keys)}, but the members are "
                f"{sorted(self.members)}"
            )
        if len(self.context) < _FRESH_BYTES:
            raise InputError(
                f"secure sum: the context has {len(self.context)} bytes, at least {_FRESH_BYTES} "
                "are needed; draw them anew for every attempt"
            )
        self._check_keys()

    def _check_keys(self) -> None:
        owner: dict[bytes, str] = {}
        for client in sorted(self.members):
            key = self.keys[client]
            if len(key) != _KEY_BYTES:
                raise InputError(
                    f"client {client!r}: its public key has {len(key)} bytes, not {_KEY_BYTES}; "
                    f"{_AGAIN}"
                )
            if key in owner:
                raise InputError(
                    f"clients {owner[key]!r} and {client!r} have the same public key, so one's "
                    f"state folder was copied from the other's; for one of them, {_AGAIN}"
                )
            owner[key] = client


def announce(keys: Mapping[str, bytes], run: str, epoch: int, round_: int) -> Announcement:
    """Announces one attempt of one round to the clients with these public keys.

    Two calls never give the same context.
    """
    name = f"{run}/{epoch}/{round_}/".encode()
    announcement = Announcement(
        tuple(sorted(keys)), dict(keys), name + secrets.token_bytes(_FRESH_BYTES)
    )
    announcement.check()
    return announcement


def private_key(folder: Path) -> X25519PrivateKey:
    """The site's own key, in the file 'secure-key' of its state folder; made on first use.

    Only the owner may read the file. Raises InputError if it is damaged or cannot be read.
    """
    path = Path(folder) / KEY_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return _new_key(path)
    except OSError as error:
        raise InputError(f"{path}: the site's key cannot be read: {error}") from error
    raw = _parse_key(content)
    if raw is None:
        raise InputError(
            f"{path}: the site's key is damaged; remove the file and start the federation again: "
            "a new key is made"
        )
    return X25519PrivateKey.from_private_bytes(raw)


def public_bytes(key: X25519PrivateKey) -> bytes:
    """The 32 bytes that the others need to know."""
    return key.public_key().public_bytes_raw()


def fixed_point(values: np.ndarray, members: int) -> np.ndarray:
    """(m,) float64 as (m, LIMBS) uint64: see the module for the format.

    Raises InputError for values that are not finite, or so large that the sum of `members` of them
    might leave the range.
    """
    _check_values(values, members)
    mantissa, exponent = np.frexp(np.abs(values))
    shift = exponent + (FRACTION - 53)
    whole = np.rint(np.ldexp(mantissa, 53 + np.minimum(shift, 0))).astype(np.uint64)
    limb, bits = np.divmod(np.maximum(shift, 0), 64)
    bits = bits.astype(np.uint64)
    magnitude = np.zeros((len(values), LIMBS + 1), np.uint64)
    rows = np.arange(len(values))
    magnitude[rows, limb] = whole << bits
    magnitude[rows, limb + 1] = whole >> np.uint64(1) >> (np.uint64(63) - bits)
    magnitude = magnitude[:, :LIMBS]
    return np.where((values < 0)[:, None], _negated(magnitude), magnitude)


def from_fixed_point(limbs: np.ndarray) -> np.ndarray:
    """(m, LIMBS) uint64 as (m,) float64, correctly rounded (to nearest, ties to even)."""
    negative = _negative(limbs)
    magnitude = np.where(negative[:, None], _negated(limbs), limbs)
    leading = LIMBS - 1 - np.argmax(magnitude[:, ::-1] != 0, axis=1)
    padded = np.concatenate([np.zeros((len(limbs), 1), np.uint64), magnitude], axis=1)
    rows = np.arange(len(limbs))
    high, middle = padded[rows, leading + 1], padded[rows, leading]
    room = np.uint64(64) - np.maximum(_bit_length(high), 1).astype(np.uint64)  # 0 to 63
    top = (high << room) | (middle >> np.uint64(1) >> (np.uint64(63) - room))
    lower = np.arange(LIMBS)[None, :] < (leading - 1)[:, None]
    rest = (middle << room != 0) | np.any((magnitude != 0) & lower, axis=1)
    # The last bit stands for all that is cut off, so that the conversion rounds as it should.
    rounded = (top | rest).astype(np.float64)
    size = np.ldexp(rounded, 64 * leading - room.astype(np.int64) - FRACTION)
    return np.where(negative, -size, size)


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The sum of two arrays (m, LIMBS) of integers modulo 2^256."""
    return _add(a, b, carry=False)


def masked(
    values: np.ndarray, me: str, key: X25519PrivateKey, announcement: Announcement
) -> np.ndarray:
    """The upload (m, LIMBS) of client `me` for its values (m,): fixed point plus all its masks.

    Raises InputError for an announcement that does not fit this client, for a key that cannot be
    used, and for values that `fixed_point` refuses.
    """
    announcement.check()
    if me not in announcement.members:
        raise InputError(
            f"client {me!r}: is not among the members {sorted(announcement.members)} of this "
            "secure sum"
        )
    if announcement.keys[me] != public_bytes(key):
        raise InputError(
            f"client {me!r}: the announced public key is not its own, so its key file was replaced "
            "or two sites use one client-id; start the federation again, which asks for the keys"
        )
    upload = fixed_point(values, len(announcement.members))
    roll = _roll(announcement)
    for partner in sorted(announcement.members):
        if partner != me:
            stream = _stream(len(values), me, partner, key, announcement, roll)
            upload = add(upload, stream) if partner > me else _add(upload, ~stream, carry=True)
    return upload


def unmasked_sum(uploads: Mapping[str, np.ndarray], announcement: Announcement) -> np.ndarray:
    """The sum (m,) of the values of all members from their uploads (m, LIMBS).

    Raises InputError if the uploads are not those of exactly the members, if one does not have the
    form of an upload, and if the masks do not cancel.
    """
    announcement.check()
    members = sorted(announcement.members)
    missing, foreign = set(members) - set(uploads), set(uploads) - set(members)
    if missing or foreign:
        raise InputError(
            f"secure sum: uploads are missing from {sorted(missing)} and not expected from "
            f"{sorted(foreign)}; repeat the round with those who remain and a fresh announcement"
        )
    _check_uploads(uploads, members)
    total = functools.reduce(add, (uploads[client] for client in members))
    _check_cancelled(total)
    return from_fixed_point(total)


def _words(values: Any) -> Iterable[str]:
    if not isinstance(values, list | tuple) or not all(isinstance(v, str) for v in values):
        raise TypeError(f"not a list of names: {values!r}")
    return values


def _new_key(path: Path) -> X25519PrivateKey:
    key = X25519PrivateKey.generate()
    with atomic_path(path) as part:
        part.touch(mode=0o600, exist_ok=False)
        part.write_bytes(_key_line(key.private_bytes_raw()))
    return key


def _key_line(raw: bytes) -> bytes:
    check = hashlib.sha256(_KEY_LABEL + raw).hexdigest()[:16]
    return b" ".join([_KEY_LABEL, raw.hex().encode(), check.encode()]) + b"\n"


def _parse_key(content: bytes) -> bytes | None:
    """The key in a key file; None if the file is damaged."""
    try:
        raw = bytes.fromhex(content.split()[1].decode())
    except (IndexError, ValueError):
        return None
    return raw if _key_line(raw) == content and len(raw) == _KEY_BYTES else None


def _check_values(values: np.ndarray, members: int) -> None:
    check_count("members", members)
    if values.ndim != 1 or values.dtype != np.float64:
        raise InputError(
            f"secure sum: values must be a vector of float64, got {values.dtype} of shape "
            f"{values.shape}"
        )
    largest = np.nextafter(2.0**RANGE / members, 0)
    for i in np.flatnonzero(~(np.abs(values) <= largest)).tolist():
        raise InputError(
            f"secure sum: value {i} is {values[i]:g}; with {members} members it must be finite and "
            f"at most {float(largest)!r} in magnitude; scale the data or use a smaller step"
        )


def _check_uploads(uploads: Mapping[str, np.ndarray], members: list[str]) -> None:
    for client in members:
        upload, first = uploads[client], uploads[members[0]]
        if upload.dtype != np.uint64 or upload.ndim != 2 or upload.shape[1] != LIMBS:
            raise InputError(
                f"client {client!r}: its upload is {upload.dtype} of shape {upload.shape}, not "
                f"uint64 of shape (m, {LIMBS})"
            )
        if len(upload) != len(first):
            raise InputError(
                f"client {client!r}: its upload has {len(upload)} values, that of {members[0]!r} "
                f"has {len(first)}"
            )


def _check_cancelled(total: np.ndarray) -> None:
    top = np.where(_negative(total), ~total[:, -1], total[:, -1])
    beyond = np.flatnonzero(top >> np.uint64(RANGE + FRACTION - 64 * (LIMBS - 1)))
    if beyond.size:
        raise InputError(
            f"secure sum: the masks do not cancel (value {beyond[0]}, {beyond.size} in all); an "
            "upload was changed, or made with another key or announcement; repeat the round with a "
            "fresh announcement"
        )


def _negative(limbs: np.ndarray) -> np.ndarray:
    return limbs[:, -1] >> np.uint64(63) != 0


def _negated(limbs: np.ndarray) -> np.ndarray:
    return _add(np.zeros_like(limbs), ~limbs, carry=True)


def _add(a: np.ndarray, b: np.ndarray, carry: bool) -> np.ndarray:
    """a + b + carry modulo 2^256."""
    total = np.empty(a.shape, np.uint64)
    carries = np.full(len(a), carry)
    for j in range(LIMBS):
        plain = a[:, j] + b[:, j]
        total[:, j] = plain + carries
        carries = (plain < b[:, j]) | (total[:, j] < plain)
    return total


def _bit_length(limb: np.ndarray) -> np.ndarray:
    """(m,) of uint64; the low bits of long ones go first, so that float64 holds them exactly."""
    held = np.where(limb >> np.uint64(53) != 0, limb & ~np.uint64(2**11 - 1), limb)
    return np.frexp(held.astype(np.float64))[1]


def _sized(*parts: bytes) -> bytes:
    """Byte strings one after the other, each with its length before it."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def _roll(announcement: Announcement) -> bytes:
    """A hash of all members and their keys."""
    pairs = ((client.encode(), announcement.keys[client]) for client in announcement.members)
    return hashlib.sha256(_sized(*(_sized(*pair) for pair in sorted(pairs)))).digest()


def _stream(
    length: int,
    me: str,
    partner: str,
    key: X25519PrivateKey,
    announcement: Announcement,
    roll: bytes,
) -> np.ndarray:
    """The random integers (length, LIMBS) that only these two know, for this attempt."""
    pair = sorted([me, partner])
    info = _sized(_LABEL, *(p.encode() for p in pair), *(announcement.keys[p] for p in pair), roll)
    secret = HKDF(SHA256(), 32, salt=announcement.context, info=info).derive(
        _shared(key, partner, announcement.keys[partner])
    )
    # A secret serves one stream, so its counter and nonce start at zero.
    cipher = Cipher(ChaCha20(secret, bytes(16)), mode=None).encryptor()
    stream = np.frombuffer(cipher.update(bytes(8 * LIMBS * length)), "<u8")
    return stream.astype(np.uint64, copy=False).reshape(length, LIMBS)


def _shared(key: X25519PrivateKey, partner: str, public: bytes) -> bytes:
    try:
        return key.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise InputError(
            f"client {partner!r}: its public key {public.hex()} gives no shared secret; {_AGAIN}"
        ) from error
