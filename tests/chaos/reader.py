"""A reader of the model in service, who looks again and again while the job that puts it there is disturbed."""

import threading
from typing import Self

from ltrscale.bundle import content_hash, load
from ltrscale.errors import InputError, UnavailableError
from ltrscale.experiments.service import InService

_BETWEEN_S = 0.02


class Reader(threading.Thread):
    """Looks at what serves until the block ends: `service.json`, and then all files of the bundle that it names.

    While S3 does not answer there is nothing to see, which is no fault of what serves.

    Args:
        out: the directory of the weekly job.
    """

    def __init__(self, out: str) -> None:
        super().__init__(name="reader", daemon=True)
        self.out = out
        self.looks = 0
        """How many times a whole bundle was found."""
        self.seen: set[str] = set()
        """The content hashes of these bundles."""
        self.faults: list[str] = []
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """Look until it is over."""
        while not self._over.wait(_BETWEEN_S):
            try:
                self._look()
            except UnavailableError:
                continue
            except InputError as error:
                self.faults.append(str(error))

    def _look(self) -> None:
        now = InService.read(self.out)
        if now is None:
            return
        bundle = load(now.bundle)
        if bundle.content_hash != now.hash:
            raise InputError(f"{now.bundle} has the hash {bundle.content_hash}, and service.json says {now.hash}")
        self.looks += 1
        self.seen.add(now.hash)

    def found(self) -> list[str]:
        """What must not be: bundles that were not whole, and bundles in service that no gate had passed."""
        now = InService.read(self.out)
        judged = set() if now is None else {now.hash, content_hash(f"{self.out}/first/trees/model")}
        refused = [f"{self.out}: {hash_[:12]} was in service, which no gate has passed" for hash_ in self.seen - judged]
        return [*self.faults, *refused]
