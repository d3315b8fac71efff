"""ltrscale: learning to rank under label scarcity, from raw logs to an evaluated ranker."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ltrscale.api.compared import compare
    from ltrscale.api.estimator import Ranker

__all__ = ["Ranker", "compare"]


def __getattr__(name: str) -> Any:
    """Import a name at its first use, because most modules of the package need much less."""
    match name:
        case "Ranker":
            from ltrscale.api.estimator import Ranker

            return Ranker
        case "compare":
            from ltrscale.api.compared import compare

            return compare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
