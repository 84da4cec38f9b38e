"""Keys and certificates of a federation: TLS for the server, an identity for every client.

The server proves itself by a certificate of the federation's own authority (CA); a SuperNode by an
ECDSA key on P-384, whose public half is registered with the SuperLink.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedexact.errors import InputError

CA_YEARS, SERVER_YEARS = 10, 2
ALWAYS = ("localhost", "127.0.0.1")  # the SuperLink's own processes speak to it under these
CA, CA_KEY, SERVER, SERVER_KEY = "ca.crt", "ca.key", "server.crt", "server.key"
CLIENTS = "clients"  # folder of the clients' keys


class Made(NamedTuple):
    """The files made, and where each belongs."""

    files: tuple[Path, ...]
    notes: tuple[str, ...]


class _Authority(NamedTuple):
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


def make_certs(folder: str | Path, hosts: Sequence[str], clients: Sequence[str]) -> Made:
    """Writes a CA, the server's certificate for `hosts`, and a key pair for each client.

    `hosts` are DNS names and IP addresses under which the SuperLink is reached; without any, only
    clients' keys are made (clients that join later). Private keys are readable by their owner only.
    Raises InputError, before anything is written, for a name that cannot be used or a file that is
    there already.
    """
    folder = Path(folder)
    names = _distinct(clients)
    alternatives = [_alternative(host) for host in dict.fromkeys([*hosts, *ALWAYS])]
    server = (CA, CA_KEY, SERVER, SERVER_KEY) if hosts else ()
    _refuse_existing(
        [folder / name for name in server]
        + [path for slug in names.values() for path in _pair(folder, slug)]
    )
    files: dict[Path, bytes] = {}
    if hosts:
        files |= _server_files(folder, alternatives)
    for client, slug in names.items():
        files |= _client_files(folder, slug, client)
    for path, content in files.items():
        _write_new(path, content, private=path.suffix in (".key", ""))
    return Made(tuple(files), tuple(_notes(folder, bool(hosts), names)))


def client_key(folder: str | Path, client: str) -> tuple[Path, Path]:
    """Where the private and the public key of a client lie."""
    return _pair(Path(folder), _slug(client))


# --- the server -----------------------------------------------------------------------------------


def _server_files(folder: Path, alternatives: Sequence[x509.GeneralName]) -> dict[Path, bytes]:
    authority = _authority()
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder("fedexact server", authority.certificate.subject, key, SERVER_YEARS)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
        .sign(authority.key, hashes.SHA256())
    )
    return {
        folder / CA: authority.certificate.public_bytes(serialization.Encoding.PEM),
        folder / CA_KEY: _private_pem(authority.key),
        folder / SERVER: certificate.public_bytes(serialization.Encoding.PEM),
        folder / SERVER_KEY: _private_pem(key),
    }


def _authority() -> _Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject("fedexact federation CA")
    certificate = (
        _builder("fedexact federation CA", subject, key, CA_YEARS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _Authority(key, certificate)


def _builder(
    name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, years: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=365 * years))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(**allowed: bool) -> x509.KeyUsage:
    uses = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
        "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{use: allowed.get(use, False) for use in uses})


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    label = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    if not re.fullmatch(rf"{label}(\.{label})*", host):
        raise InputError(f"--host {host!r}: neither a DNS name nor an IP address (without a port)")
    return x509.DNSName(host)


# --- the clients ----------------------------------------------------------------------------------


def _client_files(folder: Path, slug: str, client: str) -> dict[Path, bytes]:
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = _pair(folder, slug)
    line = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return {
        private: key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        ),
        public: line + b"\n",
    }


def _pair(folder: Path, slug: str) -> tuple[Path, Path]:
    return folder / CLIENTS / slug, folder / CLIENTS / f"{slug}.pub"


def _distinct(clients: Sequence[str]) -> dict[str, str]:
    """The name of its files by client."""
    names: dict[str, str] = {}
    for client in clients:
        slug = _slug(client)
        if slug in names.values():
            raise InputError(f"--client {client!r}: {slug} is the key of another client already")
        names[client] = slug
    return names


def _slug(client: str) -> str:
    slug = re.sub(r"[^A-Za-z0-9]+", "-", client).strip("-").lower()
    if not slug:
        raise InputError(f"--client {client!r}: a name needs a letter or a digit")
    return slug


# --- files ----------------------------------------------------------------------------------------


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _refuse_existing(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.exists():
            raise InputError(
                f"{path}: is there already and stays as it is; give another folder, or move it away"
            )


def _write_new(path: Path, content: bytes, private: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _notes(folder: Path, server: bool, names: dict[str, str]) -> list[str]:
    notes = []
    if server:
        notes += [
            f"{folder / SERVER}, {folder / SERVER_KEY}: to the machine of the SuperLink "
            "(--ssl-certfile, --ssl-keyfile)",
            f"{folder / CA}: to the SuperLink (--ssl-ca-certfile), to every client and to whoever "
            "submits runs (root certificates)",
            f"{folder / CA_KEY}: nowhere; keep it offline, it makes the next server certificate "
            f"(this one is valid for {SERVER_YEARS} years)",
            f"the SuperLink: flower-superlink --ssl-ca-certfile {CA} --ssl-certfile {SERVER} "
            f"--ssl-keyfile {SERVER_KEY} --enable-supernode-auth --host 0.0.0.0 "
            "--disable-runtime-dependency-installation --database superlink.db",
        ]
    for client, slug in names.items():
        private, public = _pair(folder, slug)
        notes.append(
            f"{private}: to {client} alone, over a safe way; its half {public} is registered with "
            f"the SuperLink: flwr supernode register {public} <connection> --name {slug}"
        )
    return notes
