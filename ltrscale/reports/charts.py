"""Charts as Vega-Lite specifications, defined once for both pages and PNG pictures.

A specification is plain data by Vega-Lite's JSON schema. Users' texts, such as names of methods and slices, occur in it
only as data and titles, never in an expression.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # drawing needs no configs
    from ltrscale.reports.document import Figure

Spec = dict[str, Any]
"""A Vega-Lite specification."""
_ChartRows = Sequence[Mapping[str, Any]]
"""The data of a chart."""

VEGA_LITE_VERSION: Final = "6.4"
_VEGA_LITE = "https://vega.github.io/schema/vega-lite/v6.4.1.json"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
WIDTH: Final = 640
"""Width of a chart in a picture, in pixels; in a page it takes the width of its container."""
_LIMIT = 150
"""Maximum width of a label, in pixels; a longer one is cut, with its full text in the tooltip."""
_SLANTED = 6
"""Maximum number of slanted names below a chart; more of them are vertical."""
_FEW_COLOURS = 10
"""Maximum number of series for the scheme of 10 colours; more take the scheme of 20."""
_LABEL_COLOURS = ["#b9b9b9", "#4c9be8", "#2fae66", "#f2a33a", "#e0455a"]
"""Colours of labels from 0 up, readable on white and on black."""


def theme(*, dark: bool) -> Spec:
    """The Vega-Lite config of charts for a light or dark page; their background is transparent."""
    text, faint, grid = ("#e4e6ea", "#7c828c", "#353b45") if dark else ("#20242b", "#8a9099", "#e3e6ea")
    words = {"labelColor": text, "titleColor": text, "titleFontWeight": "normal", "labelLimit": _LIMIT}
    return {
        "background": "transparent",
        "font": _FONT,
        "view": {"stroke": None},
        "axis": {**words, "gridColor": grid, "domainColor": faint, "tickColor": faint, "labelSeparation": 2},
        "legend": {**words, "orient": "top", "columns": 2},
        "title": {"color": text, "fontWeight": "normal", "fontSize": 12, "anchor": "start", "limit": 300},
        "rule": {"color": faint},
        "text": {"color": text},
    }


def _chart_of(rows: _ChartRows, **parts: Any) -> Spec:
    return {
        "$schema": _VEGA_LITE,
        "data": {"values": list(rows)},
        "width": "container",
        "autosize": {"type": "fit-x", "contains": "padding"},
        **parts,
    }


def _encoding(field: str, kind: str, title: str | None = None, **more: Any) -> Spec:
    """The encoding of a field, untitled by default."""
    return {"field": field, "type": kind, "title": title, **more}


def _number(field: str, title: str | None = None, *, zero: bool = False, **scale: Any) -> Spec:
    return _encoding(field, "quantitative", title, scale={"zero": zero, **scale})


def _in_order(rows: _ChartRows, field: str) -> list[Any]:
    """The values of a field in the order of the rows; Vega would sort them."""
    return list(dict.fromkeys(row[field] for row in rows))


def _named(names: Sequence[str]) -> Spec:
    """A horizontal axis of names without overlaps: few are slanted, more are vertical, and too many are thinned out."""
    return {"labelAngle": -30} if len(names) <= _SLANTED else {"labelAngle": -90, "labelOverlap": "greedy"}


def _series(rows: _ChartRows, order: Sequence[str] = ()) -> Spec:
    """Colours of `series`, with a legend if several; `order`, all series of a page, keeps them equal across charts."""
    names = _in_order(rows, "series")
    legend = {"values": names} if len(names) > 1 else None
    domain = list(order or names)
    colours = "tableau10" if len(domain) <= _FEW_COLOURS else "tableau20"
    return _encoding("series", "nominal", scale={"domain": domain, "scheme": colours}, legend=legend)


def interval_row(name: str, summary: "Figure", **more: Any) -> dict[str, Any]:
    """A row of `interval_chart`: a mean and its interval, null if undefined."""
    return {"name": name, "mean": summary.mean, "low": summary.low, "high": summary.high, **more}


def curve_rows(name: str, estimates: Mapping[Any, "Figure"], *, shift: float = 1.0) -> list[dict[str, Any]]:
    """Rows of `lines` for the series `name`: estimates by `x`, which is multiplied by `shift`; undefined ones left out.

    Series that are shifted differently do not hide each other.
    """
    return [
        {"x": x if shift == 1.0 else x * shift, "y": e.mean, "low": e.low, "high": e.high, "series": name}
        for x, e in estimates.items()
        if e.mean is not None
    ]


def interval_chart(
    rows: _ChartRows,
    *,
    title: str,
    at: float | None = None,
    order: Sequence[str] = (),
    unit: str = "",
) -> Spec:
    """Dots with bars: a row for each name, with `name`, `mean`, `low`, `high`.

    Rows may have a `series`, which colours them in the `order` of the page, and `faded`, for the background. A line
    marks the value `at`; `unit` formats the values.
    """
    names, series, several = _in_order(rows, "name"), _in_order(rows, "series"), 1
    y: Spec = {"y": _encoding("name", "nominal", sort=names)}
    if len(rows) > len(names):
        y["yOffset"], several = _encoding("series", "nominal", sort=series), len(series)
    opacity = {"condition": {"test": "datum.faded", "value": 0.3}, "value": 1}
    tips = [_encoding("name", "nominal", "name"), _encoding("series", "nominal", "of")]
    tips += [_encoding(field, "quantitative", field, format=".4f") for field in ("mean", "low", "high")]
    shared = {**y, "color": _series(rows, order), "opacity": opacity, "tooltip": tips}
    along = {**_number("mean", title), "axis": {"format": unit} if unit else {}}
    bar = {**shared, "x": {**along, "field": "low"}, "x2": {"field": "high"}}
    layers = [
        {"mark": {"type": "rule", "strokeWidth": 2}, "encoding": bar},
        {"mark": {"type": "point", "filled": True, "size": 60}, "encoding": {**shared, "x": along}},
    ]
    if at is not None:
        layers.insert(0, {"mark": {"type": "rule", "strokeDash": [4, 3]}, "encoding": {"x": {"datum": at}}})
    return _chart_of(rows, height=max(24, 10 * several) * len(names), layer=layers)


def lines(
    rows: _ChartRows,
    *,
    x: str,
    y: str,
    log: bool = False,
    ordinal: bool = False,
    ticks: Sequence[float] = (),
    order: Sequence[str] = (),
    dots: bool = True,
    zero: bool = False,
    marks: _ChartRows = (),
    level: float | None = None,
) -> Spec:
    """A line for each series: the rows have `x`, `y`, `series`, and `low` and `high` if there is an interval.

    `x` may be names (`ordinal`); `ticks` are those of the x axis, by default round numbers, and `order` has all series
    of the page, for their colours. `level` is a value to mark with a line, on which `marks` are points of a `series`.
    """
    scale = {"type": "log", "nice": False, "padding": 20} if log else {"zero": False, "padding": 20 if ticks else 0}
    axis = {"values": list(ticks), "format": "~s"} if ticks else {}
    across: Spec = {"x": _encoding("x", "quantitative", x, scale=scale, axis=axis)}
    if ordinal:
        across = {"x": _encoding("x", "ordinal", x, sort=_in_order(rows, "x"), axis={"labelOverlap": True})}
    tips = [_encoding("series", "nominal", "of"), _encoding("x", "ordinal" if ordinal else "quantitative", "at")]
    tips.append(_encoding("y", "quantitative", "value", format=".4f"))
    shared = {**across, "color": _series(rows, order), "tooltip": tips}
    line = {"type": "line", "point": {"size": 28}} if dots else {"type": "line", "strokeWidth": 1.5}
    layers: list[Spec] = [{"mark": line, "encoding": {**shared, "y": _number("y", y, zero=zero)}}]
    if any(row.get("low") is not None for row in rows):
        band: Spec = {"y": _number("low", y, zero=zero), "y2": {"field": "high"}}
        layers.append({"mark": {"type": "rule", "opacity": 0.6}, "encoding": {**shared, **band}})
    if level is not None:
        layers.insert(0, {"mark": {"type": "rule"}, "encoding": {"y": {"datum": level}}})
    if marks:
        cross = {"type": "point", "shape": "cross", "angle": 45, "size": 90, "filled": True}
        encoding = {"x": across["x"], "y": {"datum": level or 0}, "color": _series(rows, order)}
        layers.append({"data": {"values": list(marks)}, "mark": cross, "encoding": encoding})
    return _chart_of(rows, height=260, layer=layers)


def tradeoff_row(name: str, x: "Figure", y: "Figure", *, faded: bool) -> dict[str, Any]:
    """A row of `tradeoffs`: a method's figures of two goals; `faded` for the background."""
    ends = {"x": x.mean, "x_low": x.low, "x_high": x.high, "y": y.mean, "y_low": y.low, "y_high": y.high}
    return {"series": name, "faded": faded, **ends}


def tradeoffs(rows: _ChartRows, *, x: str, y: str) -> Spec:
    """A point for each row of `tradeoff_row`, with the bars of both intervals."""
    across, up = _number("x", x), _number("y", y)
    tips = [_encoding("series", "nominal", "of")]
    tips += [_encoding(field, "quantitative", title, format=".4f") for field, title in (("x", x), ("y", y))]
    opacity = {"condition": {"test": "datum.faded", "value": 0.3}, "value": 1}
    shared: Spec = {"color": _series(rows), "opacity": opacity, "tooltip": tips}
    bar_x = {**shared, "x": {**across, "field": "x_low"}, "x2": {"field": "x_high"}, "y": up}
    bar_y = {**shared, "y": {**up, "field": "y_low"}, "y2": {"field": "y_high"}, "x": across}
    point = {"type": "point", "filled": True, "size": 70}
    layers = [
        *({"mark": {"type": "rule"}, "encoding": bar} for bar in (bar_x, bar_y)),
        {"mark": point, "encoding": {**shared, "x": across, "y": up}},
    ]
    return _chart_of(rows, height=320, layer=layers)


def bars(rows: _ChartRows, *, title: str, order: Sequence[str] = (), unit: str = "%") -> Spec:
    """A bar for each row of `name`, `value` and `series`, side by side for a name's series; `unit` formats values."""
    names, series = _in_order(rows, "name"), _in_order(rows, "series")
    encoding: Spec = {
        "y": _encoding("name", "nominal", sort=names),
        "x": _encoding("value", "quantitative", title, axis={"format": unit} if unit else {}),
        "color": _series(rows, order),
        "tooltip": [_encoding("name", "nominal", "name"), _encoding("value", "quantitative", "value", format=".4f")],
    }
    beside = len(series) if len(rows) > len(names) else 1
    if beside > 1:
        encoding["yOffset"] = _encoding("series", "nominal", sort=series)
    return _chart_of(rows, height=max(18, 9 * beside) * len(names), mark="bar", encoding=encoding)


def histogram(
    counts: Sequence[int], edges: Sequence[float], *, title: str, below: float | None, at_least: float | None
) -> Spec:
    """Counts by bin on a logarithmic scale from 0, with lines at two cuts; bins beyond them are red."""
    left, right = (-math.inf if below is None else below), (math.inf if at_least is None else at_least)
    centres = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
    rows = [
        {"low": edges[i], "high": edges[i + 1], "count": count, "beyond": not left <= centres[i] < right}
        for i, count in enumerate(counts)
        if count
    ]
    colour = {"condition": {"test": "datum.beyond", "value": _LABEL_COLOURS[4]}, "value": _LABEL_COLOURS[1]}
    across = {"x": _number("low", title, domain=[edges[0], edges[-1]]), "x2": {"field": "high"}}
    ticks = [0, *(10**power for power in range(1, 12) if 10**power <= max(counts))]
    up = _encoding(
        "count", "quantitative", "documents", scale={"type": "symlog"}, axis={"values": ticks, "format": ",d"}
    )
    layers: list[Spec] = [{"mark": "bar", "encoding": {**across, "y": up, "y2": {"datum": 0}, "color": colour}}]
    places = [cut for cut in (left, right) if edges[0] <= cut <= edges[-1]]
    layers += [{"mark": {"type": "rule", "strokeDash": [4, 3]}, "encoding": {"x": {"datum": cut}}} for cut in places]
    return _chart_of(rows, height=120, layer=layers)


def scatter(rows: _ChartRows, *, title: str, labels: Sequence[float]) -> Spec:
    """Points without axes, sized and coloured by label; the rows have `x`, `y`, `label`, and are sorted by `label`."""
    shades = [shade(label, max(labels)) for label in labels]
    colours = {"scale": {"domain": list(labels), "range": [_LABEL_COLOURS[s] for s in shades]}}
    sizes = {"scale": {"domain": list(labels), "range": [16 + 16 * s for s in shades]}}
    bare: Spec = {"axis": None, "scale": {"zero": False}}
    encoding = {
        "x": _encoding("x", "quantitative", **bare),
        "y": _encoding("y", "quantitative", **bare),
        "color": _encoding("label", "ordinal", "label", **colours),
        "size": _encoding("label", "ordinal", "label", **sizes),
        "tooltip": [_encoding("label", "ordinal", "label")],
    }
    mark = {"type": "circle", "opacity": 0.75}
    return _chart_of(rows, height=300, title=title, mark=mark, encoding=encoding)


def shade(label: float, highest: float) -> int:
    """The index of a label's colour among five: 0 for no relevance, 4 for the highest label."""
    if label <= 0 or highest <= 0:
        return 0
    return max(1, min(4, round(4 * label / highest)))


def parallel(rows: _ChartRows, ends: _ChartRows, *, title: str) -> Spec:
    """Parallel coordinates: a line for each setting, coloured by its value.

    The rows have `line`, the number of a line, `axis`, `place` on it from 0 to 1, `shown`, its text, and `value`;
    `ends` have `axis`, `place` and `shown` of the texts beside the axes.
    """
    axes = _in_order(rows, "axis")
    across = {"x": _encoding("axis", "nominal", sort=axes, axis={**_named(axes), "grid": True})}
    up: Spec = {"y": _encoding("place", "quantitative", axis=None, scale={"domain": [0, 1]})}
    colour = _encoding("value", "quantitative", title, scale={"scheme": "viridis"})
    tips = [_encoding(name, "nominal", name) for name in ("line", "axis", "shown")]
    drawn = {**across, **up, "color": colour, "detail": {"field": "line"}, "tooltip": tips}
    text = {"type": "text", "align": "left", "dx": 4, "fontSize": 10}
    layers: list[Spec] = [
        {"mark": {"type": "line", "opacity": 0.6}, "encoding": drawn},
        {
            "data": {"values": list(ends)},
            "mark": text,
            "encoding": {**across, **up, "text": _encoding("shown", "nominal")},
        },
    ]
    return _chart_of(rows, height=260, layer=layers)
