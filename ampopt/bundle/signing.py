"""Ed25519 signatures: they show who made a file; a hash only shows that the file is unchanged.

Keys are PEM files: the private one PKCS #8, without a password and readable by its owner only; the public
one SubjectPublicKeyInfo. `openssl pkeyutl -verify -rawin` and others read the same keys and signatures.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ampopt.errors import InputError, need
from ampopt.system.atomic import create
from ampopt.system.plain_files import open_named, path_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE_BYTES = 64

MOST_KEY_BYTES = 1 << 16


def generate_keys(private_path: str | Path, public_path: str | Path) -> None:
    """Write a new key pair to two new files; the private key has permissions 0600.

    Raises InputError if a file exists already or cannot be written, MissingExtraError without `cryptography`.
    """
    need("cryptography.hazmat.primitives.asymmetric.ed25519", "sign")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    for path in (private_path, public_path):
        if os.path.lexists(path):
            raise InputError(f"{path} exists, and a key is never overwritten: choose another name")
    private = Ed25519PrivateKey.generate()
    secret = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    for path, content, mode in ((private_path, secret, 0o600), (public_path, public, 0o644)):
        try:
            create(path, content, mode)
        except OSError as e:
            raise InputError(f"the key {path} cannot be written: {e.strerror}") from e


def sign(key_path: str | Path, message: bytes) -> bytes:
    """The signature of `message`, 64 bytes, with the private key in the PEM file `key_path`.

    Raises InputError if that is not such a key, MissingExtraError without `cryptography`.
    """
    return _private_key(key_path).sign(message)


def is_signed(key_path: str | Path, message: bytes, signature: bytes) -> bool:
    """Whether `signature` is that of `message` by the owner of the public key in the PEM file `key_path`.

    Raises InputError if that is not such a key, MissingExtraError without `cryptography`.
    """
    key = _public_key(key_path)
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, message)  # whatever its length
    except InvalidSignature:
        return False
    return True


def _private_key(path: str | Path) -> Ed25519PrivateKey:
    need("cryptography.hazmat.primitives.asymmetric.ed25519", "sign")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read_pem(path)
    try:
        key = load_pem_private_key(data, password=None)
    except TypeError as e:
        raise InputError(f"the key {path} has a password, which ampopt cannot ask for") from e
    except (ValueError, UnsupportedAlgorithm) as e:
        raise InputError(f"{path} is no private key in PEM: make one with generate_keys") from e
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"the key {path} is not an Ed25519 key: make one with generate_keys")
    return key


def _public_key(path: str | Path) -> Ed25519PublicKey:
    need("cryptography.hazmat.primitives.asymmetric.ed25519", "sign")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    data = _read_pem(path)
    if b"PRIVATE KEY" in data:
        raise InputError(f"{path} is a private key, which stays with the maker: give the public one")
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as e:
        raise InputError(f"{path} is no public key in PEM: make one with generate_keys") from e
    if not isinstance(key, Ed25519PublicKey):
        raise InputError(f"the key {path} is not an Ed25519 key: make one with generate_keys")
    return key


def _read_pem(path: str | Path) -> bytes:
    try:
        with open_named(path_of(path), "the key", MOST_KEY_BYTES) as file:
            return file.read()
    except OSError as e:
        raise InputError(f"the key {path} cannot be read: {e.strerror}") from e
