"""Signed build folders: who signed them, what has changed since, and what is opened only if it was signed."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import invoke
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

import mod_export
from mod_export.errors import BuildFolderError, UsageError
from mod_export.folder.manifest import MANIFEST, checksum, read_manifest
from mod_export.folder.signature import SIGNATURE, check_identity, check_signature, sign_folder
from mod_export.serve.service import ServiceOptions, open_service

PEM = serialization.Encoding.PEM


def written(folder: Path, name: str, key: PrivateKeyTypes, password: bytes | None = None) -> tuple[Path, Path]:
    """Writes a key as openssl does; returns the private and the public file."""
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    how = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    private.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, how))
    public.write_bytes(key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ours` and `other` of P-256, `long` of P-521, `secret` with a password, `rsa`."""
    folder = tmp_path_factory.mktemp("keys")
    for name, curve in (("ours", ec.SECP256R1()), ("other", ec.SECP256R1()), ("long", ec.SECP521R1())):
        written(folder, name, ec.generate_private_key(curve))
    written(folder, "secret", ec.generate_private_key(ec.SECP384R1()), b"open sesame")
    written(folder, "rsa", rsa.generate_private_key(65537, 2048))
    (folder / "password").write_text("open sesame\n")
    return folder


@pytest.fixture
def signed(small_copy: Path, keys: Path) -> Path:
    sign_folder(small_copy, keys / "ours.pem")
    return small_copy


def test_a_folder_is_signed_and_verified_by_commands(small_copy: Path, keys: Path) -> None:
    found = invoke("sign", small_copy, "--key", keys / "ours.pem")
    assert (found.exit_code, found.stdout) == (0, f"signed: {small_copy / SIGNATURE}\n")
    found = invoke("verify", small_copy, "--key", keys / "other.pub", "--key", keys / "ours.pub")
    files = len(read_manifest(small_copy)["files"])
    assert (found.exit_code, found.stdout) == (0, f"{small_copy}: signed, and its {files} files are unchanged\n")
    # Nothing else is left, and signing again replaces the signature.
    assert not list(small_copy.glob(".partial*"))
    sign_folder(small_copy, keys / "long.pem")
    check_signature(small_copy, [keys / "long.pub"])
    found = invoke("verify", small_copy, "--key", keys / "ours.pub")
    assert (found.exit_code, found.stderr) == (
        2,
        f"error: {small_copy}: was signed with another key; trusted: {keys / 'ours.pub'}\n",
    )


def test_model_signings_own_command_accepts_it(signed: Path, keys: Path) -> None:
    command = [sys.executable, "-m", "model_signing", "verify", "key", signed / MANIFEST, "--signature"]
    command += [signed / SIGNATURE, "--public_key"]
    for name, code in (("ours", 0), ("other", 1)):
        ran = subprocess.run([*map(str, command), keys / f"{name}.pub"], capture_output=True, text=True, check=False)
        assert ran.returncode == code, ran.stderr


def test_an_encrypted_key(small_copy: Path, keys: Path, tmp_path: Path) -> None:
    found = invoke("sign", small_copy, "--key", keys / "secret.pem", "--password-file", keys / "password")
    assert found.exit_code == 0, found.stderr
    check_signature(small_copy, [keys / "secret.pub"])
    expected = f"{keys / 'secret.pem'}: expected a private key of P-256, P-384 or P-521 in PEM, with its --password"
    (tmp_path / "wrong").write_text("sesame")
    (tmp_path / "empty").touch()
    for options, message in (
        ([], expected),
        (["--password-file", tmp_path / "wrong"], expected),
        (["--password-file", tmp_path / "empty"], f"{tmp_path / 'empty'}: expected a password in its first line"),
        (["--password-file", tmp_path / "none"], f"{tmp_path / 'none'}: cannot be read (No such file or directory)"),
    ):
        found = invoke("sign", small_copy, "--key", keys / "secret.pem", *options)
        assert (found.exit_code, found.stderr.startswith(f"error: {message}")) == (2, True), found.stderr


def test_what_can_be_loaded(signed: Path, keys: Path) -> None:
    ids = np.zeros((1, 16), np.int64)
    trusted = [keys / "other.pub", keys / "ours.pub"]
    with mod_export.load(signed) as plain, mod_export.load(signed, trusted_keys=trusted) as checked:
        np.testing.assert_array_equal(plain.run(ids)[0], checked.run(ids)[0])
    options = ServiceOptions(trusted_keys=(keys / "ours.pub",))
    with open_service(signed, options) as service:
        assert service.ready
    with pytest.raises(BuildFolderError, match=r"was signed with another key; trusted: .*other\.pub$"):
        mod_export.load(signed, trusted_keys=[keys / "other.pub"])
    with (
        pytest.raises(BuildFolderError, match="was signed with another key"),
        open_service(signed, ServiceOptions(trusted_keys=(keys / "other.pub",))),
    ):
        pass
    with pytest.raises(UsageError, match=r"^trusted_keys: names no key, so that nothing could be opened; None asks"):
        mod_export.load(signed, trusted_keys=[])


@pytest.mark.slow
def test_a_folder_that_is_validated_and_timed_stays_signed(signed: Path, keys: Path) -> None:
    for name in ("validate", "bench"):
        # On a busy machine a gate of speed may fail, which is no matter here.
        assert invoke(name, signed).exit_code in (0, 4)
    assert invoke("verify", signed, "--key", keys / "ours.pub").exit_code == 0


def test_an_unsigned_folder(small: Path, keys: Path, tmp_path: Path) -> None:
    message = rf"^{small}: is not signed \(it has no manifest.json.sig\); mod-export sign {small} --key KEY.pem"
    with pytest.raises(BuildFolderError, match=message):
        mod_export.load(small, trusted_keys=[keys / "ours.pub"])
    with pytest.raises(BuildFolderError, match=r"is not signed"):
        mod_export.load_generator(small, trusted_keys=[keys / "ours.pub"])
    with pytest.raises(BuildFolderError, match=r"no manifest.json here, so this is not a build folder"):
        check_signature(tmp_path, [keys / "ours.pub"])
    # No name of a command's options is a key, and nobody is trusted by default.
    commands = (
        ("serve", small, "--port", 0),
        ("generate", small, "x"),
        ("generate", small, "--ids", "1", "--selection", "topk-prefill"),
        ("triton", small, "-o", tmp_path / "repository"),
    )
    for command in commands:
        found = invoke(*command, "--trusted-key", keys / "ours.pub")
        assert (found.exit_code, "is not signed" in found.stderr) == (2, True), command


def test_one_bit_changed_in_each_file(signed: Path, keys: Path) -> None:
    names = [*read_manifest(signed)["files"], MANIFEST]
    assert len(names) > 5
    for name in names:
        path = signed / name
        content = path.read_bytes()
        changed = bytearray(content)
        changed[len(changed) // 2] ^= 1
        path.write_bytes(changed)
        found = invoke("verify", signed, "--key", keys / "ours.pub")
        assert (found.exit_code, name in found.stderr) == (2, True), (name, found.stderr)
        path.write_bytes(content)
    assert invoke("verify", signed, "--key", keys / "ours.pub").exit_code == 0


def test_a_manifest_that_was_made_to_fit_a_changed_file(signed: Path, keys: Path) -> None:
    """Whoever can change files can also write their hashes, and the manifest's own checksum; not the signature."""
    data = read_manifest(signed)
    name = next(iter(data["files"]))
    data["files"][name]["sha256"] = "0" * 64
    (signed / MANIFEST).write_text(json.dumps({**data, "checksum": checksum(data)}))
    assert read_manifest(signed) == data
    with pytest.raises(BuildFolderError, match=r": its manifest.json has been changed since it was signed; trusted: "):
        mod_export.load(signed, trusted_keys=[keys / "other.pub", keys / "ours.pub"])


def test_the_signature_of_another_folder(signed: Path, small: Path, keys: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(small, tmp_path / "other"))
    (other / MANIFEST).write_text((other / MANIFEST).read_text() + "\n")
    shutil.copy(signed / SIGNATURE, other / SIGNATURE)
    with pytest.raises(BuildFolderError, match=r"its manifest.json has been changed since it was signed"):
        check_signature(other, [keys / "ours.pub"])


@pytest.mark.parametrize("content", [b"", b"garbage", b"{}", b"[]", b"\xff\xfe", b'{"mediaType": 3}'])
def test_a_damaged_signature(signed: Path, keys: Path, content: bytes) -> None:
    (signed / SIGNATURE).write_bytes(content)
    with pytest.raises(BuildFolderError, match=r"manifest.json.sig: (damaged, or )?not a signature"):
        check_signature(signed, [keys / "ours.pub"])


def test_a_signature_whose_statement_was_replaced(signed: Path, keys: Path) -> None:
    bundle = json.loads((signed / SIGNATURE).read_text())
    statement = base64.b64decode(bundle["dsseEnvelope"]["payload"])
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(statement.replace(b"sha256", b"sha512")).decode()
    (signed / SIGNATURE).write_text(json.dumps(bundle))
    with pytest.raises(BuildFolderError, match=r"damaged, or not a signature \(InvalidSignature\)"):
        check_signature(signed, [keys / "ours.pub"])


def test_files_that_are_no_keys(signed: Path, keys: Path, tmp_path: Path) -> None:
    for name in ("rsa.pub", "ours.pem", "password"):
        with pytest.raises(UsageError, match=rf"{name}: expected a public key of P-256, P-384 or P-521 in PEM"):
            check_signature(signed, [keys / name])
    for name in ("rsa.pem", "ours.pub", "password"):
        with pytest.raises(UsageError, match=rf"{name}: expected a private key of P-256, P-384 or P-521 in PEM"):
            sign_folder(signed, keys / name)
    with pytest.raises(UsageError, match=r"none.pub: cannot be read \(No such file or directory\)$"):
        check_signature(signed, [tmp_path / "none.pub"])
    with pytest.raises(UsageError, match=r"none.pem: cannot be read \(No such file or directory\)$"):
        sign_folder(signed, tmp_path / "none.pem")


def test_a_folder_that_cannot_be_written(small_copy: Path, keys: Path) -> None:
    (small_copy / SIGNATURE).mkdir()
    with pytest.raises(UsageError, match=r"manifest.json.sig: cannot be written \(.*\)$"):
        sign_folder(small_copy, keys / "ours.pem")


def test_a_damaged_folder_is_not_signed(small_copy: Path, keys: Path) -> None:
    (small_copy / next(iter(read_manifest(small_copy)["files"]))).unlink()
    with pytest.raises(BuildFolderError, match="is missing or not a regular file"):
        sign_folder(small_copy, keys / "ours.pem")
    assert not (small_copy / SIGNATURE).exists()


def test_options_that_do_not_fit(small: Path, keys: Path) -> None:
    for arguments in ([], ["--key", keys / "ours.pem", "--keyless"]):
        found = invoke("sign", small, *arguments)
        assert (found.exit_code, found.stderr) == (2, "error: sign: expected --key FILE or --keyless\n")
    for arguments in (
        [],
        ["--identity", "a@example.org"],
        ["--key", keys / "ours.pub", "--issuer", "https://example.org"],
        ["--key", keys / "ours.pub", "--identity", "a@example.org", "--issuer", "https://example.org"],
    ):
        found = invoke("verify", small, *arguments)
        message = "error: verify: expected --key FILE, or --identity NAME with --issuer URL\n"
        assert (found.exit_code, found.stderr) == (2, message)


def test_sigstore_cannot_be_reached(small_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test talks to Sigstore: a proxy that refuses stands in the way."""
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with pytest.raises(UsageError, match=r": Sigstore did not sign it \("):
        sign_folder(small_copy, None)
    with pytest.raises(UsageError, match=r"^Sigstore's roots of trust cannot be fetched \("):
        check_identity(small_copy, "a@example.org", "https://example.org")
    assert not (small_copy / SIGNATURE).exists()
