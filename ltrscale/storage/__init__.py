"""Files and directories, on a local disk or at the URLs of `urls.SCHEMES`; no other module opens URLs.

Stages hand each other directories. A directory is what its `manifest.json` lists: data files are put in place first and
the manifest last, so a reader sees all of a stage's output or none of it. The first manifest is put conditionally: of
two writers one wins and the other is told. One that replaces another is put once that is seen to be unchanged, which
leaves a moment: writers of one directory are to run one at a time. The same rule holds on a local disk and on S3. What
is committed on a local disk is flushed to it first, so that it survives a crash of the machine.

An S3 endpoint other than Amazon's is named by the environment variable `AWS_ENDPOINT_URL`, as in Amazon's own tools.
Requests that S3 answers with 503 are repeated for about half a minute.
"""

from ltrscale.storage.commit import MANIFEST, Commit, Placed, read_manifest, read_verified
from ltrscale.storage.faults import is_fault, named_errors, patiently
from ltrscale.storage.files import (
    children,
    create_exclusively,
    exists,
    fingerprint,
    list_files,
    open_input,
    read_bytes,
    remove,
    sha256,
    size,
    write_bytes,
)
from ltrscale.storage.filesystems import arrow_filesystem, filesystem
from ltrscale.storage.names import listed_file, listed_path, period_name
from ltrscale.storage.urls import absolute, is_local, join, local_path

__all__ = [
    "MANIFEST",
    "Commit",
    "Placed",
    "absolute",
    "arrow_filesystem",
    "children",
    "create_exclusively",
    "exists",
    "filesystem",
    "fingerprint",
    "is_fault",
    "is_local",
    "join",
    "list_files",
    "listed_file",
    "listed_path",
    "local_path",
    "named_errors",
    "open_input",
    "patiently",
    "period_name",
    "read_bytes",
    "read_manifest",
    "read_verified",
    "remove",
    "sha256",
    "size",
    "write_bytes",
]
