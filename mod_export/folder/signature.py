"""Signs build folders, and checks who signed them: OpenSSF Model Signing (package model-signing, extra `sign`).

Only the manifest is signed. It holds the SHA-256 of every other file of the folder that is ever opened, and each file
is compared with its hash before use. So one small file vouches for a folder of any size, and caches that engines write
beside their files do not break the signature. The signature is a Sigstore bundle, which other tools can check:

    model_signing verify key DIR/manifest.json --signature DIR/manifest.json.sig --public_key KEY.pub
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from mod_export.errors import BuildFolderError, UsageError
from mod_export.folder.files import PARTIAL, replace_file
from mod_export.folder.manifest import MANIFEST, open_folder

SIGNATURE = "manifest.json.sig"
CURVES = "P-256, P-384 or P-521"
OTHER_KEY = "was signed with another key"


def sign_folder(root: Path, key: Path | None, password: bytes | None = None) -> Path:
    """Signs a build folder whose files are as its manifest says, and returns the path of the signature.

    Args:
        root: the folder.
        key: a private key of the curve P-256, P-384 or P-521 in a PEM file. None signs without a key, through
            Sigstore's public services, which ask who the signer is, and publish the signer's identity and the hash of
            the manifest.
        password: password of the key, if the key is encrypted.

    Raises:
        BuildFolderError: the folder is not a complete build folder, or a file is damaged.
        UsageError: the key cannot be used, Sigstore cannot be reached, or the folder is not writable.
    """
    from model_signing import signing

    open_folder(root)
    config = signing.Config()
    try:
        if key is not None:
            config.use_elliptic_key_signer(private_key=key, password=password)
    except OSError as error:
        raise UsageError(f"{key}: cannot be read ({error.strerror})") from error
    except Exception as error:  # The libraries raise many types of errors for a file without such a key.
        expected = f"expected a private key of {CURVES} in PEM"
        raise UsageError(f"{key}: {expected}, with its --password-file if it is encrypted ({error})") from error
    path, beside = root / SIGNATURE, root / f"{PARTIAL}{SIGNATURE}"
    try:
        config.sign(root / MANIFEST, beside)
        replace_file(path, beside.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error
    except Exception as error:  # Each of Sigstore's services fails in its own way.
        raise UsageError(f"{root}: Sigstore did not sign it ({type(error).__name__}: {error})") from error
    finally:
        beside.unlink(missing_ok=True)
    return path


def check_signature(root: Path, trusted_keys: Sequence[str | Path] | None) -> None:
    """Checks that the owner of one of these keys has signed the manifest of a build folder. None checks nothing.

    The caller still has to compare the other files of the folder with the manifest.

    Args:
        root: the folder.
        trusted_keys: public keys, each a PEM file.

    Raises:
        BuildFolderError: the folder is not signed, or not by the owner of one of these keys, or its manifest has
            changed since it was signed.
        UsageError: no key is given, or a file holds no key.
    """
    if trusted_keys is None:
        return
    if not trusted_keys:
        raise UsageError("trusted_keys: names no key, so that nothing could be opened; None asks for no signature")
    from model_signing import verifying

    reasons = []
    for key in map(Path, trusted_keys):
        config = verifying.Config()
        try:
            config.use_elliptic_key_verifier(public_key=key)
        except OSError as error:
            raise UsageError(f"{key}: cannot be read ({error.strerror})") from error
        except Exception as error:  # A file without a public key causes many types of errors, too.
            raise UsageError(f"{key}: expected a public key of {CURVES} in PEM ({error})") from error
        try:
            with _explained(root):
                config.verify(root / MANIFEST, root / SIGNATURE)
        except BuildFolderError as error:
            reasons.append((key, error))
        else:
            return
    tried = ", ".join(str(key) for key, _ in reasons)
    _, first = next((pair for pair in reasons if OTHER_KEY not in str(pair[1])), reasons[0])
    raise BuildFolderError(f"{first}; trusted: {tried}") from first


def check_identity(root: Path, identity: str, issuer: str) -> None:
    """Checks that this identity, such as an e-mail address, signed a build folder without a key, through Sigstore.

    Args:
        root: the folder.
        identity: the identity that must have signed the folder.
        issuer: URL of the OpenID Connect service that vouches for the identity.

    Raises:
        BuildFolderError: the folder is not signed, or is signed by another identity, or its manifest has changed since
            it was signed.
        UsageError: Sigstore's roots of trust cannot be fetched.
    """
    from model_signing import verifying

    config = verifying.Config()
    try:
        config.use_sigstore_verifier(identity=identity, oidc_issuer=issuer)
    except Exception as error:  # Sigstore's network client raises errors of several types.
        raise UsageError(f"Sigstore's roots of trust cannot be fetched ({type(error).__name__}: {error})") from error
    with _explained(root):
        config.verify(root / MANIFEST, root / SIGNATURE)


@contextlib.contextmanager
def _explained(root: Path) -> Iterator[None]:
    """Turns the errors of a verification into messages for the user."""
    if not (root / MANIFEST).is_file():
        raise BuildFolderError(f"{root}: no {MANIFEST} here, so this is not a build folder of mod-export")
    if not (root / SIGNATURE).is_file():
        raise BuildFolderError(f"{root}: is not signed (it has no {SIGNATURE}); mod-export sign {root} --key KEY.pem")
    try:
        yield
    except ValueError as error:
        text = str(error)
        if "Key mismatch" in text:
            raise BuildFolderError(f"{root}: {OTHER_KEY}") from error
        if "Signature mismatch" in text:
            raise BuildFolderError(f"{root}: its {MANIFEST} has been changed since it was signed") from error
        raise BuildFolderError(f"{root / SIGNATURE}: not a signature of Model Signing ({text})") from error
    except Exception as error:  # Damaged signatures fail in the libraries below in many ways.
        raise BuildFolderError(f"{root / SIGNATURE}: damaged, or not a signature ({type(error).__name__})") from error
