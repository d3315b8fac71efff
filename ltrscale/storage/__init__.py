"""Files and directories, on a local disk or at the URLs of `names.SCHEMES`; no other module opens URLs.

Stages hand each other directories. A directory consists of the files that its `manifest.json` lists. A writer puts the
data files in place first and the manifest last, so a reader sees all of a stage's output or none of it. A manifest is
put only if nobody has put another since the writer began: of two writers one wins, and the other fails with an error
(`commit`). A job holds a lease on its output directory, so that two jobs never do the same work at once (`lease`). The
same rules hold on a local disk and on S3. A commit to a local disk is flushed first, so that it survives a crash of the
machine.

The environment (`AWS_ENDPOINT_URL` names a store other than Amazon's), `~/.aws/config` and the profile choose the S3
store, keys, certificates and proxy as in Amazon's own tools, for all libraries alike. While S3 cannot be reached or is
overloaded, requests are retried for three minutes, or for `LTRSCALE_STORAGE_PATIENCE_S` seconds. A refusal that a retry
cannot cure is reported at once.
"""

from ltrscale.storage import scratch
from ltrscale.storage.commit import Commit, Placed, withdraw, withdraw_below
from ltrscale.storage.faults import PATIENCE, is_disk_full, is_fault, named_errors, patiently
from ltrscale.storage.files import (
    at_once,
    below,
    children,
    exists,
    fingerprint,
    list_files,
    open_input,
    read_bytes,
    read_if_there,
    remove,
    remove_with_folders,
    sha256,
    size,
    sizes_below,
    write_bytes,
)
from ltrscale.storage.lease import WHEN_BUSY, LeaseLost, check_lease, hold, swap
from ltrscale.storage.listing import (
    HIDDEN_MANIFEST,
    MANIFEST,
    are_hashes,
    is_whole,
    listed_in,
    parse_manifest,
    read_manifest,
    read_manifest_part,
    read_verified,
    sizes_in,
    sweep,
    sweep_helpers,
)
from ltrscale.storage.names import (
    HIDDEN_RUN,
    RUN,
    absolute,
    check_links,
    check_scheme,
    is_local,
    join,
    listed_file,
    listed_path,
    local_path,
    period_name,
)
from ltrscale.storage.stores import arrow_filesystem, clock_ahead_s, delta_options, filesystem, heeds_conditions
from ltrscale.storage.writers import Lease, is_held, join_leases, place, share_leases

__all__ = [
    "HIDDEN_MANIFEST", "HIDDEN_RUN", "MANIFEST", "PATIENCE", "RUN", "WHEN_BUSY", "Commit", "Lease", "LeaseLost",
    "Placed", "absolute", "are_hashes", "arrow_filesystem", "at_once", "below", "check_lease", "check_links",
    "check_scheme", "children", "clock_ahead_s", "delta_options", "exists", "filesystem", "fingerprint",
    "heeds_conditions", "hold", "is_disk_full", "is_fault", "is_held", "is_local", "is_whole", "join", "join_leases",
    "list_files", "listed_file", "listed_in", "listed_path", "local_path", "named_errors", "open_input",
    "parse_manifest", "patiently", "period_name", "place", "read_bytes", "read_if_there", "read_manifest",
    "read_manifest_part", "read_verified", "remove", "remove_with_folders", "scratch", "sha256", "share_leases", "size",
    "sizes_below", "sizes_in", "swap", "sweep", "sweep_helpers", "withdraw", "withdraw_below", "write_bytes",
]  # fmt: skip
