"""Keys and signatures: only the owner's fit, other programs read them, and a bad key is a clear error."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ampopt.bundle.signing import SIGNATURE_BYTES, generate_keys, is_signed, sign
from ampopt.errors import InputError, MissingExtraError
from tests.support.full_disk import FullDisk


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A private and a public key."""
    generate_keys(tmp_path / "secret.pem", tmp_path / "public.pem")
    return tmp_path / "secret.pem", tmp_path / "public.pem"


def test_a_signature_is_that_of_one_message_by_one_owner(keys: tuple[Path, Path], tmp_path: Path) -> None:
    secret, public = keys
    signature = sign(secret, b"message")
    assert len(signature) == SIGNATURE_BYTES
    assert is_signed(public, b"message", signature)
    assert not is_signed(public, b"messagf", signature)
    generate_keys(tmp_path / "other", tmp_path / "other.pub")
    assert not is_signed(tmp_path / "other.pub", b"message", signature)


@pytest.mark.parametrize("size", [0, 1, 63, 65, 1000])
def test_a_signature_of_another_length_does_not_fit(size: int, keys: tuple[Path, Path]) -> None:
    assert not is_signed(keys[1], b"message", (sign(keys[0], b"message") * 20)[:size])


def test_every_changed_bit_of_a_signature_is_seen(keys: tuple[Path, Path]) -> None:
    signature = sign(keys[0], b"message")
    for bit in range(8 * SIGNATURE_BYTES):
        number = int.from_bytes(signature, "little") ^ 1 << bit
        assert not is_signed(keys[1], b"message", number.to_bytes(SIGNATURE_BYTES, "little"))


def test_the_private_key_is_its_owners(keys: tuple[Path, Path]) -> None:
    assert keys[0].stat().st_mode & 0o777 == 0o600
    assert keys[0].read_text().startswith("-----BEGIN PRIVATE KEY-----")
    assert keys[1].read_text().startswith("-----BEGIN PUBLIC KEY-----")


@pytest.mark.parametrize("there", ["secret.pem", "public.pem"])
def test_a_key_is_never_overwritten(there: str, tmp_path: Path) -> None:
    (tmp_path / there).write_text("precious")
    with pytest.raises(InputError, match=f"{there} exists"):
        generate_keys(tmp_path / "secret.pem", tmp_path / "public.pem")
    assert [item.name for item in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "precious"


def test_keys_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        generate_keys(tmp_path / "nowhere" / "secret", tmp_path / "public")


def test_nothing_stays_of_a_key_that_cannot_be_written_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ampopt.system.atomic.open", FullDisk, raising=False)
        with pytest.raises(InputError, match="No space left"):
            generate_keys(tmp_path / "secret.pem", tmp_path / "public.pem")
    assert list(tmp_path.iterdir()) == []
    generate_keys(tmp_path / "secret.pem", tmp_path / "public.pem")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_reads_the_same_keys_and_signatures(keys: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "message").write_bytes(b"message")
    (tmp_path / "signature").write_bytes(sign(keys[0], b"message"))
    command = ["openssl", "pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", str(keys[1]), "-in", "message"]
    subprocess.run([*command, "-sigfile", "signature"], check=True, cwd=tmp_path, capture_output=True)


def write_other_keys(path: Path, password: bytes | None = None) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    key = (
        ec.generate_private_key(ec.SECP256R1()) if password is None else ed25519.Ed25519PrivateKey.generate()
    )
    lock = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(pem, form, lock))
    public = serialization.PublicFormat.SubjectPublicKeyInfo
    path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(pem, public))


def test_other_keys_are_refused(keys: tuple[Path, Path], tmp_path: Path) -> None:
    write_other_keys(tmp_path / "curve")
    write_other_keys(tmp_path / "locked", b"password")
    (tmp_path / "text").write_text("no key")
    (tmp_path / "torn").write_bytes(keys[0].read_bytes()[:60] + b"\n-----END PRIVATE KEY-----\n")
    (tmp_path / "torn.pub").write_bytes(keys[1].read_bytes()[:50] + b"\n-----END PUBLIC KEY-----\n")
    for name, reason in {
        "curve": "not an Ed25519 key", "locked": "password", "text": "no private key",
        "torn": "no private key", "public.pem": "no private key", "nowhere": "there is no file",
        ".": "is a folder",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=reason):
            sign(tmp_path / name, b"message")
    for name, reason in {
        "curve.pub": "not an Ed25519 key", "text": "no public key", "torn.pub": "no public key",
        "secret.pem": "is a private key", "nowhere": "there is no file", ".": "is a folder",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=reason):
            is_signed(tmp_path / name, b"message", bytes(64))


def test_without_cryptography_the_error_names_the_extra(
    keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    with pytest.raises(MissingExtraError, match=r"cryptography .*ampopt\[sign\]"):
        sign(keys[0], b"message")
    with pytest.raises(MissingExtraError, match="sign"):
        is_signed(keys[1], b"message", bytes(64))
    with pytest.raises(MissingExtraError, match="sign"):
        generate_keys(tmp_path / "new", tmp_path / "new.pub")
