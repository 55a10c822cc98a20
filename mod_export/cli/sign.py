"""The commands that sign a build folder and check who signed it: sign, verify."""

from __future__ import annotations

from pathlib import Path

import click

from mod_export.cli.boundary import PATH, command, folder_argument
from mod_export.errors import UsageError


@click.command()
@folder_argument
@click.option("--key", metavar="FILE", type=PATH, help="Private key, P-256, P-384 or P-521, in PEM.")
@click.option("--password-file", metavar="FILE", type=PATH, help="Password of an encrypted key, in its first line.")
@click.option(
    "--keyless", is_flag=True, help="Sign through Sigstore's public services, which ask who you are and publish it."
)
@command
def sign(folder: Path, key: Path | None, password_file: Path | None, keyless: bool, verbosity: int) -> int:
    """Sign a build folder, so that others can check who made it."""
    from mod_export.folder.signature import sign_folder

    if (key is None) != keyless:
        raise UsageError("sign: expected --key FILE or --keyless")
    password = None
    if password_file is not None:
        try:
            password = password_file.read_bytes().splitlines()[0]
        except OSError as error:
            raise UsageError(f"{password_file}: cannot be read ({error.strerror})") from error
        except IndexError:
            raise UsageError(f"{password_file}: expected a password in its first line, it is empty") from None
    click.echo(f"signed: {sign_folder(folder, key, password)}")
    return 0


@click.command()
@folder_argument
@click.option(
    "--key", "keys", metavar="FILE", type=PATH, multiple=True,
    help="Public key in PEM; may be given several times, and one must fit.",
)  # fmt: skip
@click.option("--identity", metavar="NAME", help="Who signed with --keyless, such as an e-mail address.")
@click.option("--issuer", metavar="URL", help="The service that vouches for --identity.")
@command
def verify(folder: Path, keys: tuple[Path, ...], identity: str | None, issuer: str | None, verbosity: int) -> int:
    """Check who signed a build folder, and that no file of it has changed."""
    from mod_export.folder.manifest import open_folder
    from mod_export.folder.signature import check_identity, check_signature

    if bool(keys) == (identity is not None) or (identity is None) != (issuer is None):
        raise UsageError("verify: expected --key FILE, or --identity NAME with --issuer URL")
    if identity is not None and issuer is not None:
        check_identity(folder, identity, issuer)
    else:
        check_signature(folder, keys)
    manifest = open_folder(folder)
    click.echo(f"{folder}: signed, and its {len(manifest.files)} files are unchanged")
    return 0
