"""The manifest of a bundle: its files, their hashes and its origin, read without loading what scores."""

import os
from collections.abc import Mapping
from typing import Any

from ltrscale import storage
from ltrscale.errors import InputError
from ltrscale.origin import digest

FORMAT, VERSION = "ltrscale-bundle", 2
_READ = (1, VERSION)
"""The versions that can be read."""
TRUSTED = "LTRSCALE_TRUSTED_BUNDLES"
"""The environment variable that names a file with the content hashes of trusted bundles."""


def _instead_of(url: str) -> str:
    """The remedy for a missing bundle: names the bundles directly below, if any."""
    if not storage.exists(url):
        return (
            "the path does not exist, so check it, or make a bundle with jobs.finetune, jobs.train_gbdt or a pipeline"
        )
    below = {child: storage.read_manifest(child) or {} for child in storage.children(url)}
    if nested := [child for child, manifest in below.items() if manifest.get("format") == FORMAT]:
        return f"name one below it: {', '.join(nested[:10])}"
    return f"it has no {storage.MANIFEST}; make a bundle with jobs.finetune, jobs.train_gbdt or a pipeline"


def read_bundle_manifest(url: str) -> dict[str, Any]:
    """The manifest of a bundle: its files with their hashes, and its origin.

    Raises:
        InputError: nothing is committed there, it is not a bundle or has another version, the environment names
            trusted bundles and this one is not among them, or its directory is named with the hash of another bundle.
    """
    manifest = storage.read_manifest(url)
    if manifest is None:
        raise InputError(f"{url}: no bundle is committed there; {_instead_of(url)}")
    path = storage.join(url, storage.MANIFEST)
    if manifest.get("format") != FORMAT:
        raise InputError(f"{path}: not a bundle but {manifest.get('format', 'something else')!r}; check the path")
    if manifest.get("version") not in _READ:
        raise InputError(
            f"{path}: a bundle of version {manifest.get('version')}, this ltrscale reads version {VERSION}; "
            "install the ltrscale that made it, or train it again"
        )
    _check_trusted(manifest, url)
    _check_named(manifest, url)
    return manifest


def content_hash(url: str) -> str:
    """Hash of the names and content hashes of a bundle's files.

    Raises:
        InputError: as `read_bundle_manifest`.
    """
    return hash_of(read_bundle_manifest(url))


def bundle_files(url: str) -> dict[str, bytes]:
    """The files of a bundle and its manifest, by name.

    Raises:
        InputError: as `read_bundle_manifest`; a file is missing or was changed.
    """
    manifest = read_bundle_manifest(url)
    files = {name: storage.read_verified(url, name, manifest) for name in storage.listed_in(manifest)}
    return files | {storage.MANIFEST: storage.read_bytes(storage.join(url, storage.MANIFEST))}


def hash_of(manifest: Mapping[str, Any], folder: str = "") -> str:
    """The content hash of a bundle, or of a member in a folder such as `members/trees/`, equal to the member's own."""
    files = storage.listed_in(manifest).items()
    return digest(sorted((path.removeprefix(folder), sha256) for path, sha256 in files if path.startswith(folder)))


def _check_named(manifest: Mapping[str, Any], url: str) -> None:
    """Check the content of a bundle in a directory named by content hash, as in serving."""
    name = url.rstrip("/").rpartition("/")[2]
    if storage.are_hashes([name]) and name != (bundle_hash := hash_of(manifest)):
        raise InputError(
            f"{url}: holds the bundle with the hash {bundle_hash[:12]}..., not the one that its name says: it was "
            "changed after it was judged; take another one, as jobs.weekly --rollback does"
        )


def _check_trusted(manifest: Mapping[str, Any], url: str) -> None:
    """Check that a bundle is trusted, if the environment names a file of trusted bundles."""
    if not (trusted := os.environ.get(TRUSTED)):
        return
    lines = storage.read_bytes(trusted).decode(errors="replace").splitlines()
    if (bundle_hash := hash_of(manifest)) not in {line.partition("#")[0].strip() for line in lines}:
        raise InputError(
            f"{url}: its content hash {bundle_hash} is not in {trusted}, which {TRUSTED} names; "
            "add a line with the hash if you trust the bundle"
        )
