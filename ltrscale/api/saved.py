"""A ranker as files: those of its bundle, and beside them its arguments and the uses of columns."""

import json
from typing import Any, Self

from ltrscale import bundle as bundles
from ltrscale import storage
from ltrscale.config import Strict, validate

_ESTIMATOR = "estimator.json"


class SavedRanker(Strict):
    """`estimator.json`, beside the files of a saved ranker's bundle."""

    arguments: dict[str, Any]
    columns: dict[str, Any]
    """The uses of columns."""
    array_width: int | None = None
    """Columns of the training array; null for a table, where columns have names."""
    names: tuple[str, ...] = ()
    """`feature_names_in_`; empty in files of older versions, where features are in the order of the bundle."""

    @classmethod
    def read(cls, url: str) -> Self | None:
        """What was saved beside a bundle; None if a job made the bundle."""
        manifest = bundles.read_bundle_manifest(url)
        if _ESTIMATOR not in storage.listed_in(manifest):
            return None
        content = json.loads(storage.read_verified(url, _ESTIMATOR, manifest))
        return validate(cls, content, storage.join(url, _ESTIMATOR))

    def commit(self, url: str, bundle: str) -> None:
        """Commit a copy of a bundle with this beside it."""
        files = bundle_files(bundle) | {_ESTIMATOR: json.dumps(self.model_dump(mode="json"), indent=1).encode()}
        manifest = json.loads(files.pop(storage.MANIFEST))
        with storage.Commit(url) as commit:
            commit.write(files)
            commit.finish({name: manifest[name] for name in ("format", "version", "made_by")})


def bundle_files(url: str) -> dict[str, bytes]:
    """The files of a bundle and its manifest, by name."""
    manifest = bundles.read_bundle_manifest(url)
    files = {name: storage.read_verified(url, name, manifest) for name in storage.listed_in(manifest)}
    return files | {storage.MANIFEST: storage.read_bytes(storage.join(url, storage.MANIFEST))}
