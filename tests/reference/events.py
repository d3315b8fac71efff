"""Attribution of events to lists, one event after the other, by its rules."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Event(NamedTuple):
    act: str
    query: str | None
    session: str | None
    item: str | None
    time: int
    position: float | None = None
    revenue: float | None = None
    id: str | None = None
    f: float | None = None


class Row(NamedTuple):
    query: str
    item: str
    position: float | None
    time: int
    session: str | None
    shown: int
    click: int
    cart: int
    order: int
    grade: int
    revenue: float
    weight: int
    f: float | None


GRADES = {"click": 1, "cart": 2, "order": 3}


def first(event: Event) -> tuple[object, ...]:
    """What decides among events that are one, or show one item: missing values last."""
    parts = (event.time, event.position, event.f, event.session, event.revenue)
    return tuple((part is None, part if part is not None else 0) for part in parts)


def once(events: Sequence[Event], left: Counter[str]) -> list[Event]:
    kept: dict[object, Event] = {}
    for event in sorted(events, key=first):
        same = event.id or (event.session, event.time, event.position, event.revenue)
        if kept.setdefault((event.act, event.query, event.item, event.id, same), event) is not event:
            left["duplicate"] += 1
    return [*kept.values()]


def attributed(events: Sequence[Event], window: int) -> tuple[list[Row], Counter[str], Counter[str]]:
    """Rows in order, the events that are left over by reason, and those that are not by act."""
    left: Counter[str] = Counter()
    by_query: dict[str, list[Event]] = defaultdict(list)
    waiting: dict[tuple[str, str], list[Event]] = defaultdict(list)
    shown: dict[tuple[str | None, str], list[Event]] = defaultdict(list)
    for event in events:
        query = event.query
        if event.act == "shown" and query is None and event.session is not None:
            query = f"{event.session}|{event.time}"
        if event.act not in ("shown", *GRADES):
            left["other_action"] += 1
        elif event.item is None:
            left["no_item"] += 1
        elif query is None and (event.session is None or event.act == "shown"):
            left["no_query"] += 1
        elif query is None:
            assert event.session is not None
            waiting[event.session, event.item].append(event)
        else:
            by_query[query].append(event._replace(query=query))
            if event.act == "shown":
                shown[event.session, event.item].append(event._replace(query=query))
    for (session, item), goals in waiting.items():
        for event in once(goals, left):
            before = [(each.time, each.query) for each in shown[session, item] if each.time <= event.time]
            if not before:
                left["not_shown"] += 1
            elif event.time - max(before)[0] > window:
                left["outside_window"] += 1
            else:
                query = max(before)[1]
                assert query is not None
                by_query[query].append(event._replace(query=query))
    rows, kept = list[tuple[int, Row]](), Counter[str]()
    for query, of_query in by_query.items():
        unique = once(of_query, left)
        shows = [event for event in unique if event.act == "shown"]
        items = {event.item for event in shows}
        for event in unique:
            if event.item in items:
                kept[event.act] += 1
            else:
                left["not_shown" if shows else "unknown_query"] += 1
        began = min((event.time for event in shows), default=0)
        for item in items:
            assert item is not None
            its = sorted((event for event in shows if event.item == item), key=first)
            goals = [event for event in unique if event.item == item and event.act != "shown"]
            happened = {act: int(any(goal.act == act for goal in goals)) for act in GRADES}
            grade = max((GRADES[act] for act, did in happened.items() if did), default=0)
            revenue = sum(sorted(goal.revenue for goal in goals if goal.act == "order" and goal.revenue is not None))
            one = its[0]
            row = Row(query, item, one.position, began, one.session, len(its), **happened, grade=grade,
                      revenue=revenue, weight=1, f=one.f)  # fmt: skip
            rows.append((began, row))
    in_order = sorted(
        rows, key=lambda each: (each[0], each[1].query, each[1].position is None, each[1].position or 0, each[1].item)
    )
    return [row for _, row in in_order], left, kept


def merged(rows: Sequence[Row], names: dict[str, str | None]) -> list[Row]:
    """Lists of one name that differ in nothing but query id, time and session, as one; `rows` as of `attributed`."""
    lists: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        lists[row.query].append(row)
    firsts: dict[object, str] = {}
    weights: Counter[str] = Counter()
    for query, of_query in lists.items():
        content = tuple((*row[1:3], *row[5:11], row.f) for row in of_query)
        name = names[query]
        weights[firsts.setdefault((name, query if name is None else "", content), query)] += 1
    return [row._replace(weight=weights[row.query]) for row in rows if row.query in weights]
