"""A stage that derives one data set from another."""

from typing import ClassVar

from ltrscale import storage
from ltrscale.config import Operational
from ltrscale.errors import InputError
from ltrscale.stages.stage import DataUrl, Stage


class Derivation(Stage):
    """Makes a data set from another one, which does not change."""

    makes_data: ClassVar = True
    out: Operational[str]
    """Directory of the new data set."""
    data: DataUrl
    """Data set directory to start from; it is not changed."""

    def check(self) -> None:
        """Refuse to replace the data set itself."""
        if _place(self.out) == _place(self.data):
            raise InputError(f"{self.out}: out is the data set itself; choose another directory")


def _place(url: str) -> str:
    """A text that is equal for equal directories."""
    return str(storage.local_path(url).resolve()) if storage.is_local(url) else url.rstrip("/")
