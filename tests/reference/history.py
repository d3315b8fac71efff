"""Features of history, event by event, from their definition."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
Row = Mapping[str, Any]


def seconds(duration: str) -> float:
    return float(duration[:-1]) * SECONDS[duration[-1]]


def feature(
    settings: Row, row: Row, events: Sequence[Row], *, time: str = "time", delay: str = "0s", step: str = "1s"
) -> float:
    """The value of a feature at a row; NaN where it is missing. Times are seconds since 1970."""
    length = seconds(step)
    now = row[time] // length * length
    by = settings["by"]
    if any(row[column] in (None, "") for column in by):
        return math.nan
    weighted = []
    for event in events:
        known_at = (event[time] + seconds(delay)) // length * length
        same = all(str(event[other]) == str(row[column]) for column, other in by.items() if event[other] is not None)
        if not same or any(event[other] is None for other in by.values()) or known_at >= now:
            continue
        if settings.get("window") and known_at < now - seconds(settings["window"]):
            continue
        half = settings.get("half_life")
        if half and now - known_at > 500 * seconds(half):
            continue
        weighted.append((2 ** (-(now - known_at) / seconds(half)) if half else 1.0, known_at, event))
    of = settings.get("of")

    def total(column: str | None) -> float:
        return math.fsum(w * (1 if column is None else event[column] or 0) for w, _, event in weighted)

    match settings["kind"]:
        case "count":
            return total(of)
        case "rate":
            per, smooth = settings.get("per"), settings.get("smooth", 0)
            below = total(per) if per else math.fsum(w for w, _, event in weighted if event[of] is not None)
            above = total(of) + smooth * settings.get("prior", 0)
            return above / (below + smooth) if below + smooth > 1e-9 else math.nan
    times = [at for _, at, event in weighted if of is None or (event[of] or 0) > 0]
    return now - (max if settings["kind"] == "last" else min)(times) if times else math.nan
