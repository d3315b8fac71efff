"""The report of real, small models on a log with hostile names: its figures, its escaping, what is left out, a browser.

One fixture trains trees and two networks, one of them pretrained, evaluates them and makes the page.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import altair
import jsonschema
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from headless import opened
from nightly import nightly

from ltrscale import storage
from ltrscale.bundle import Bundle
from ltrscale.config import validate
from ltrscale.errors import InputError, UnavailableError
from ltrscale.evaluation.bounds import Check, GateVerdict
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.evaluation.measure.outliers import OutlierRule
from ltrscale.evaluation.measure.page import best_of, headline, opening
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import EvaluateConfig
from ltrscale.evaluation.measure.slices import ALL
from ltrscale.experiments.report import groups
from ltrscale.experiments.report.differences import differing
from ltrscale.experiments.report.groups import read_groups_scored
from ltrscale.experiments.report.make import ReportJob, _paragraphs
from ltrscale.experiments.report.recorded import _curves_of, feature_blocks
from ltrscale.experiments.report.sources import Sources, records
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.reports.document import Chart, Document, LeftOut, Points, Table, Text, cell
from ltrscale.reports.findings import write_report
from ltrscale.stages.stage import Stage
from ltrscale.texts import escape
from ltrscale.training.finetune import FinetuneJob
from ltrscale.training.pretrain import PretrainJob
from ltrscale.trees.gbdt import GBDTJob
from ltrscale.tuning.history import History, Result, Trial

pytestmark = pytest.mark.slow
SCRIPT, COMMENT, MARKUP = "<script>alert(1)</script>", "</script><!--", "<b onclick>&amp;</b>"
FEATURES = ["x", f"y{COMMENT}", "z"]
COLOURS = [MARKUP, "red", "a name of more than 64 characters, of which a table does not show the end at all"]
ROOT = Path(__file__).resolve().parents[3]
METHODS = ["gbdt", f"scratch {MARKUP}", "`pretrained`|*b*"]
PERIODS = {"train": ["a", "b"], "validation": ["c"], "test": ["d", "e"]}
NETWORK = {"encoder": {"width": 8, "blocks": 1}}
SHORT = {"docs_per_batch": 200, "streams": 1}


def write_log(path: Path) -> str:
    """A log with one item a row: labels follow x with noise, z is sometimes missing and once extreme."""
    rng, rows = np.random.default_rng(0), []
    for p, period in enumerate([*PERIODS["train"], *PERIODS["validation"], *PERIODS["test"]]):
        for q in range(40):
            for i in range(int(rng.integers(3, 9))):
                x, y, z = rng.normal(size=3) + 0.2 * p
                z = 1000.0 if (q, i) == (1, 0) else z if rng.random() < 0.9 else np.nan
                label = 0.0 if q % 4 == 0 else float(np.clip(round(x + rng.normal()), 0, 2))
                colour = COLOURS[(q + i) % 3] if i else None
                ids: dict[str, Any] = {
                    "colour": colour,
                    "query": f"{period} {q} {SCRIPT}",
                    "item": f"{COMMENT}{i}",
                    "period": period,
                }
                ids |= {"title": f"{SCRIPT} {i}", "device": ["phone", MARKUP][q % 2], "euro": 10 * label * (i + 1)}
                rows.append({**ids, "label": label, **dict(zip(FEATURES, (x, y, z), strict=True))})
    rows.append({**rows[-1], "query": "bad", "label": np.inf})
    pd.DataFrame(rows).to_parquet(path)
    return str(path)


def run(stage: type[Stage], out: Path, **settings: Any) -> str:
    validate(stage, {"out": str(out), **settings}, "test").run()
    return str(out)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The directories of data, evaluation and page."""
    folder = tmp_path_factory.mktemp("report")
    columns: dict[str, Any] = {
        "query": "query",
        "item": "item",
        "label": "label",
        "period_column": "period",
        "features": FEATURES,
    }
    columns |= {"categorical": ["colour"], "gain": "euro", "meta": ["device"]}
    prepare = {
        "inputs": [write_log(folder / "log.parquet")],
        "source": {"kind": "items", "columns": columns},
        "max_rejected": 0.1,
    }
    data = run(PrepareJob, folder / "data", prepare=prepare)
    splits = {name: {"data": data, "periods": of} for name, of in PERIODS.items()}
    pretrained = run(
        PretrainJob, folder / "pre", train=splits["train"], pretrain={"network": NETWORK, "epochs": 1, "stream": SHORT}
    )
    finetune = {"head_epochs": 1, "epochs": 1, "stream": SHORT}
    scratch = run(FinetuneJob, folder / "scratch", splits=splits, finetune={**finetune, "network": NETWORK})
    tuned = run(FinetuneJob, folder / "tuned", splits=splits, finetune=finetune, pretrained=pretrained)
    trees = run(GBDTJob, folder / "gbdt", splits=splits, gbdt={"num_trees": 5, "num_threads": 1, "min_data_in_leaf": 5})
    evaluate = {
        "models": dict(zip(METHODS, (trees, scratch, tuned), strict=True)),
        "splits": splits,
        "slices": {
            MARKUP: "n_documents > 5",
            "[a](javascript:b)": "any(z is null)",
            "constructor": "n_documents > 3",
            "red": "any(colour == 'red')",
        },
        "by_period": True,
        "gains": "column",
        "resamples": 200,
    }
    evaluation = run(EvaluateJob, folder / "evaluation", evaluate=evaluate)
    page = run(ReportJob, folder / "page", evaluation=evaluation, documents=60)
    return {"data": data, "evaluation": evaluation, "page": page, "pre": pretrained, "gbdt": trees}


@pytest.fixture(scope="module")
def html(places: Mapping[str, str]) -> str:
    return Path(places["page"], "report.html").read_text()


class Read(HTMLParser):
    """The tags, texts and table cells of a page, as a browser reads them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.cells: list[str] = []
        self.inside: list[str] = []
        self.data: dict[str, Any] = {}
        self.identifier = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if tag in ("td", "script"):
            self.inside.append(tag)
            self.identifier = dict(attrs).get("id") or ""
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, data: str) -> None:
        if self.inside == ["td"]:
            self.cells[-1] += data
        elif self.inside == ["script"] and self.identifier:
            self.data[self.identifier] = json.loads(data)


@pytest.fixture(scope="module")
def page(html: str) -> Read:
    return Read(html)


def test_figures_equal_the_evaluation(places: Mapping[str, str], page: Read) -> None:
    evaluation = Evaluation.read(places["evaluation"])
    assert [method.name for method in evaluation.methods] == METHODS
    leaders = page.data["specifications"][0]["data"]["values"]
    for method, row in zip(evaluation.ranked, leaders, strict=True):
        summary = method.slices[ALL].summaries[evaluation.primary]
        assert (row["name"], row["mean"], row["low"]) == (method.name, summary.mean, summary.low)
        at = page.cells.index(method.name)
        assert cell(method.slices[ALL].summaries["ndcg@1"].mean) == page.cells[at + 1]
        assert cell(summary.mean) == page.cells[at + 2]
        if c := method.slices[ALL].comparisons.get(evaluation.primary):
            assert f"{c.difference:+.4f} [{c.low:+.4f}, {c.high:+.4f}]" in page.cells[at : at + 8]
    rows = [row for spec in page.data["specifications"] for row in spec["data"]["values"]]
    hostile = next(row for row in rows if (row.get("name"), row.get("series")) == (MARKUP, METHODS[1]))
    assert hostile["mean"] == evaluation.methods[1].slices[MARKUP].comparisons[evaluation.primary].difference


def test_the_page_opens_with_what_was_found_by_the_same_figures(places: Mapping[str, str], html: str) -> None:
    evaluation = Evaluation.read(places["evaluation"])
    best = best_of(evaluation)
    assert best is not None
    assert set(evaluation.leads) == {*METHODS} - {best.name}
    for method in evaluation.methods:
        mean, own = (m.slices[ALL].summaries[evaluation.primary].mean for m in (best, method))
        assert mean is not None
        if method is not best:
            assert evaluation.leads[method.name].difference == pytest.approx(own - mean)
        elif (c := method.slices[ALL].comparisons.get(evaluation.primary)) is not None:
            lead = evaluation.leads[METHODS[0]]
            assert (lead.difference, lead.low, lead.high) == pytest.approx((-c.difference, -c.high, -c.low))
    assert headline(evaluation) == unescape(html[html.index("<h1>") + 4 : html.index("</h1>")])
    opened = html[html.index('<p class="opening">') : html.index("</header>")]
    assert f"ranks best: NDCG@5 {cell(best.slices[ALL].summaries[evaluation.primary].mean)} [" in opened
    assert "features is at most" in opened
    assert "Next: " in opened
    of_evaluation = Path(places["evaluation"], "report.md").read_text()
    assert escape(opening(evaluation)[0]) in of_evaluation
    assert escape(opening(evaluation)[0]) in Path(places["page"], "report.md").read_text()


def test_lists_say_what_they_are_of_with_titles_and_what_they_bring(places: Mapping[str, str]) -> None:
    (section,) = [section for section in document(places).sections if section.name == "Differences"]
    tables = [block for block in section.blocks if isinstance(block, Table)]
    assert len(tables) == 6
    for table in tables:
        assert re.match(rf"query [de] \d+ {re.escape(SCRIPT)} \(device .+\), \d documents: ", table.caption)
        assert "(device phone)" in table.caption or f"(device {MARKUP})" in table.caption
        at = table.header.index("document")
        assert table.header[at - 1 : at + 2] == ["euro", "document", "title"]
        for row in table.rows:
            number_of = row[at].removeprefix(COMMENT)
            assert row[at + 1] == f"{SCRIPT} {number_of}"
            assert float(row[at - 1]) == 10 * float(row[0]) * (int(number_of) + 1)


@pytest.mark.nightly
def test_falls_over_periods_stand_beside_their_noise(places: Mapping[str, str]) -> None:
    (section,) = [s for s in document(places).sections if s.name == "Periods"]
    said = [block.text for block in section.blocks if isinstance(block, Text)]
    assert any(text.startswith("From d to e NDCG@5 falls ") for text in said), said
    assert "From d to e NDCG@5 falls " in Path(places["evaluation"], "report.md").read_text()


def test_what_trees_memorise_is_named_and_usual_categories_have_their_names(tmp_path: Path) -> None:
    """A number of the row, which trees split by as long as rows are few, beside an honest feature that is weak."""
    rng, rows = np.random.default_rng(0), []
    for period, lists in (("a", 60), ("b", 30), ("c", 900)):
        for q in range(lists):
            for x in rng.normal(size=8):
                label = float(x + 2 * rng.normal() > 2)
                colour = ["red", "red", "blue"][rng.integers(3)]
                features = {"x": x, "row": rng.random(), "colour": colour}
                rows.append({"query": f"{period}{q}", "period": period, "label": label, **features})
    pd.DataFrame(rows).to_parquet(tmp_path / "log.parquet")
    columns: dict[str, Any] = {"query": "query", "label": "label", "period_column": "period"}
    columns |= {"features": ["x", "row"], "categorical": ["colour"]}
    prepare = {"inputs": [str(tmp_path / "log.parquet")], "source": {"kind": "items", "columns": columns}}
    data = run(PrepareJob, tmp_path / "data", prepare=prepare)
    splits = {n: {"data": data, "periods": [p]} for n, p in zip(("train", "validation", "test"), "abc", strict=True)}
    gbdt = {"num_trees": 10, "num_threads": 1, "min_data_in_leaf": 5, "early_stopping_rounds": None}
    trees = run(GBDTJob, tmp_path / "gbdt", splits=splits, gbdt=gbdt)
    evaluate = {"models": {"gbdt": trees}, "splits": splits, "resamples": 200}
    sources = Sources.open(run(EvaluateJob, tmp_path / "evaluation", evaluate=evaluate))
    assert {*sources.memorised} >= {"row"}
    assert "x" not in sources.memorised
    assert re.match(r"row is probably memorised: it has \d+% of the gain of gbdt, and alone", sources.memorised["row"])
    texts = [block.text for block in _paragraphs(sources, gate=None) if isinstance(block, Text)]
    assert any(re.match(r"Probably memorised, for alone they rank like chance: .*\brow\b", text) for text in texts)
    blocks = [*feature_blocks(sources)]
    assert any("row is probably memorised" in block.text for block in blocks if isinstance(block, Text))
    (table,) = [block for block in blocks if isinstance(block, Table)]
    (row,) = [row for row in table.rows if row[0] == "colour"]
    assert row[-1].startswith("other than red for ")


def test_charts_of_outliers_are_said_to_be_cut_only_where_they_are(places: Mapping[str, str]) -> None:
    sources = Sources.open(places["evaluation"])
    detector = sources.evaluation.detector
    with_category = detector.replace(rules={**detector.rules, "colour": OutlierRule(at_least=1)})  # has no histogram
    evaluation = sources.evaluation.replace(detector=with_category)
    *_, last = groups.outliers(replace(sources, evaluation=evaluation), documents=1000)
    assert isinstance(last, Text)
    assert "the validation split. Rules were" in last.text


@pytest.mark.nightly
def test_a_single_period_is_a_table(places: Mapping[str, str], tmp_path: Path) -> None:
    config = EvaluateConfig.recorded(places["evaluation"])
    one = config.splits.replace(test=config.splits.test.replace(periods=("d",)))
    for name, by_period in (("sliced", {"by_period": False, "slice_by": ["period"]}), ("measured", {})):
        evaluate = config.replace(splits=one, **by_period).model_dump()
        evaluation = run(EvaluateJob, tmp_path / name, evaluate=evaluate)
        (section,) = [s for s in document(places, evaluation=evaluation).sections if s.name == "Periods"]
        assert [block.why for block in section.blocks if isinstance(block, LeftOut)] == (
            ["the evaluation has not measured drift; run jobs.evaluate with evaluate.by_period=true"] * bool(by_period)
        )
        assert not [block for block in section.blocks if isinstance(block, Chart)]
        table = next(block for block in section.blocks if isinstance(block, Table))
        assert not table.folded
        assert len(table.rows) == len(METHODS)
        mean = cell(Evaluation.read(evaluation).methods[0].slices["period=d"].summaries["ndcg@5"].mean)
        assert any(cell.startswith(mean) for cell in table.rows[0])


def test_specifications_follow_the_schema(page: Read) -> None:
    for spec in page.data["specifications"]:
        altair.Chart.from_dict({**spec, "config": page.data["themes"]["dark"]})
    with pytest.raises(jsonschema.ValidationError):
        altair.Chart.from_dict({**page.data["specifications"][0], "hight": 1})


def test_names_are_text(html: str, page: Read) -> None:
    assert page.handlers == []
    assert "b" not in page.tags
    assert page.tags.count("script") == 4  # the drawing library, two of data, the lines that draw
    assert any(COMMENT in cell for cell in page.cells), "documents"
    assert MARKUP in page.cells
    assert f"y{COMMENT}" in json.dumps(page.data["specifications"]) or f"y{COMMENT}" in page.cells
    queries = re.findall(r"query .{1,9}&lt;script&gt;alert\(1\)&lt;/script&gt;", html)
    assert len(queries) == 6
    assert "<!--" not in html
    assert SCRIPT not in html
    assert not re.search(
        r"(src|href)=[\"']?(https?:)?//", html.replace(html[html.index("<script>") : html.rindex("</script>")], "")
    )


def test_markdown_has_the_same_figures_and_escapes_too(places: Mapping[str, str], page: Read) -> None:
    folder = Path(places["page"])
    text = (folder / "report.md").read_text()
    assert SCRIPT not in text
    assert MARKUP not in text
    assert "\\`pretrained\\`" in text
    pictures = re.findall(r"\]\(([\w-]+\.png)\)", text)
    assert len(pictures) == len(page.data["specifications"]) == len(set(pictures))
    for name in pictures:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    figures = {cell for cell in page.cells if re.fullmatch(r"\d\.\d{4}", cell)}
    assert len(figures) > 10
    assert all(figure in text for figure in figures)


@pytest.mark.parametrize(("width", "dark"), [(1400, False), nightly(1400, True), nightly(400, False), (400, True)])
def test_opens_in_a_browser(places: Mapping[str, str], page: Read, tmp_path: Path, width: int, dark: bool) -> None:
    found = opened(Path(places["page"], "report.html"), tmp_path, width=width, dark=dark)
    assert found.problems == []
    assert found.overlaps == []
    assert len(found.charts) == len(page.data["specifications"]) > 10
    assert all(50 < w <= width and h > 50 for w, h in found.charts), found.charts
    assert found.marks > 150
    assert (found.width, found.overflow, found.dark) == (width, 0, dark)
    assert found.ground == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
    assert SCRIPT in found.text


def test_the_browser_sees_problems(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<html><head></head><body><p style='width:900px'>x</p><script>missing()</script></body></html>")
    found = opened(page, tmp_path, width=400, dark=False)
    assert found.problems == ["error: Uncaught ReferenceError: missing is not defined"]
    assert found.overflow > 400


def document(places: Mapping[str, str], **settings: Any) -> Document:
    settings = {"evaluation": places["evaluation"], "documents": 60, **settings}
    return ReportJob(out="page", **settings).document()


def left_out(found: Document) -> dict[str, list[str]]:
    """The lines of what is left out, by section; those of whole sections stand in the last one."""
    lines = {s.name: [block.why for block in s.blocks if isinstance(block, LeftOut)] for s in found.sections}
    if found.sections[-1].name == "Not shown":
        (points,) = found.sections[-1].blocks
        assert isinstance(points, Points)
        for name, _, why in (text.partition(": ") for text in points.texts):
            assert name not in [s.name for s in found.sections]
            lines[name] = [*lines.get(name, []), why]
    return {name: why for name, why in lines.items() if why}


def test_what_is_not_named_is_left_out_with_a_line(places: Mapping[str, str]) -> None:
    found = left_out(document(places))
    assert set(found) == {"Gate", "Study", "Search"}
    for name, job in {"Gate": "gate", "Study": "study", "Search": "tune"}.items():
        (line,) = found[name]
        assert f"jobs.{job}" in line


@pytest.mark.parametrize("outage", [True, False])
def test_an_outage_ends_a_report_which_would_lack_a_section_for_good(
    places: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, outage: bool
) -> None:
    error = UnavailableError("no answer in time") if outage else InputError("damaged")

    def refusing(*_: Any) -> Bundle:
        raise error

    monkeypatch.setattr(Sources, "opened", refusing)
    if outage:
        with pytest.raises(UnavailableError, match="no answer in time"):
            document(places)
    else:
        assert any("damaged" in line for lines in left_out(document(places)).values() for line in lines)


def test_what_cannot_be_reached_is_left_out_with_a_line(places: Mapping[str, str], tmp_path: Path) -> None:
    """The data and the pretrained bundle are gone, and the trees have lost their run record."""
    moved = []
    for place in (Path(places["data"]), Path(places["pre"]), Path(places["gbdt"], "run")):
        kept = tmp_path / f"{len(moved)}"
        shutil.move(place, kept)
        moved.append((kept, place))
    try:
        found = left_out(document(places, gate=str(tmp_path / "none")))
    finally:
        for kept, place in moved:
            shutil.move(kept, place)
    assert set(found) >= {
        "Learning curves",
        "Features",
        "Rank 1",
        "Outliers",
        "Embeddings",
        "Agreement",
        "Differences",
        "Quarantine",
    }
    assert all(places["data"] in found[name][-1] for name in ("Outliers", "Agreement", "Differences", "Quarantine"))
    assert found["Learning curves"][0].startswith("gbdt: ")
    assert "metrics.jsonl" in found["Learning curves"][0]
    assert "jobs.gate" in found["Gate"][0]


def test_the_feature_that_makes_the_labels_drives_rank_1(places: Mapping[str, str]) -> None:
    (section,) = [s for s in document(places).sections if s.name == "Rank 1"]
    (chart,) = [block for block in section.blocks if isinstance(block, Chart)]
    rows = chart.spec["data"]["values"]
    methods = list(dict.fromkeys(row["series"] for row in rows))
    assert len(methods) == 2
    assert {*methods} <= {*METHODS}
    for method in methods:
        shares = {row["name"]: row["value"] for row in rows if row["series"] == method}
        assert max(shares, key=lambda name: shares[name]) == FEATURES[0]
        assert sum(shares.values()) == pytest.approx(1, abs=0.02)
    sentences = next(block.texts for block in section.blocks if isinstance(block, Points))
    assert all(" stands above the next " in sentence and SCRIPT in sentence for sentence in sentences)


def test_embeddings_are_of_the_groups_stated_and_the_same_again(places: Mapping[str, str]) -> None:
    sources = Sources.open(places["evaluation"])
    table = pq.read_table(Path(places["evaluation"], "groups.parquet")).to_pandas()
    defined = table[(table.method == "gbdt") & table[sources.evaluation.primary].notna()]
    batches = [part.groups for part in read_groups_scored(sources, groups._sampled(sources, 60, 3))]
    gids = [int(gid) for batch in batches for gid in batch.ids_Q]  # type: ignore[union-attr]
    assert set(gids) <= set(defined.gid)
    assert len(set(gids)) == len(gids) > 5
    expected = defined[defined.gid.isin(gids)].documents.sum()
    both = [list(groups.embeddings(sources, {}, documents=60, seed=3)) for _ in range(2)]
    shown = [[block for block in blocks if isinstance(block, Chart)] for blocks in both]
    assert shown[0] == shown[1]
    assert [chart.spec["title"] for chart in shown[0]] == [
        f"{METHODS[1]}, supervised",
        f"{METHODS[2]}, pretrained",
    ]
    labels = sorted(float(y) for batch in batches for y in batch.labels_N)  # type: ignore[union-attr]
    for chart in shown[0]:
        assert len(chart.spec["data"]["values"]) == expected
        assert [row["label"] for row in chart.spec["data"]["values"]] == labels


def test_lists_are_those_that_differ_most(places: Mapping[str, str]) -> None:
    """Ranks, against pandas, and the metric of the groups, against `groups.parquet`."""
    sources = Sources.open(places["evaluation"], (METHODS[0], METHODS[2]))
    wide = pq.read_table(Path(places["evaluation"], "groups.parquet")).to_pandas()
    lead = wide.pivot(index="gid", columns="method", values=sources.evaluation.primary)
    lead = (lead[METHODS[2]] - lead[METHODS[0]]).dropna()
    tables = [block for block in differing(sources, 2) if isinstance(block, Table)]
    shown = [re.findall(r" (\d\.\d{4}) by", table.caption) for table in tables]
    found = [float(one) - float(other) for one, other in shown]
    assert found == pytest.approx([*lead.nlargest(2), *lead.nsmallest(2)], abs=2e-4)
    for table in tables:
        ranks = [int(row[1]) for row in table.rows]
        assert ranks == sorted(ranks)
        assert sorted(int(row[2]) for row in table.rows) == ranks == list(range(1, len(ranks) + 1))
        highest = max(float(row[0]) for row in table.rows)
        assert [shade > 0 for shade in table.shades] == [float(row[0]) > 0 for row in table.rows]
        assert highest > 0


def test_every_list_is_shown_once_and_on_its_side_however_many_are_asked_for(places: Mapping[str, str]) -> None:
    """The lists are those of `groups.parquet`, also where a side has fewer than the number."""
    sources = Sources.open(places["evaluation"], (METHODS[0], METHODS[2]))
    wide = pq.read_table(Path(places["evaluation"], "groups.parquet")).to_pandas()
    wide = wide.pivot(index="gid", columns="method", values=sources.evaluation.primary)
    lead = (wide[METHODS[2]] - wide[METHODS[0]]).dropna()
    ahead, behind = lead[lead > 0].sort_values(ascending=False), lead[lead < 0].sort_values()
    for n in (1, min(len(ahead), len(behind)), max(len(ahead), len(behind)), len(wide)):
        tables = [block for block in differing(sources, n) if isinstance(block, Table)]
        queries = [table.caption.partition(" (device")[0] for table in tables]
        assert len(queries) == len({*queries})
        shown = [re.findall(r" (\d\.\d{4}) by", table.caption) for table in tables]
        found = [float(one) - float(other) for one, other in shown]
        assert found == pytest.approx([*ahead[:n], *behind[:n]], abs=2e-4)


def test_categories_have_their_names(places: Mapping[str, str]) -> None:
    sources = Sources.open(places["evaluation"])
    tables = [block for block in differing(sources, 3) if isinstance(block, Table)]
    shown = {row[table.header.index("colour")] for table in tables for row in table.rows}
    long = "a name of more than 64 characters, of which a table does not sh…"
    assert shown == {MARKUP, "red", long, "-"}
    assert len(long) == 64
    log = pd.read_parquet(Path(places["data"]).parent / "log.parquet")
    tested = log[log.period.isin(PERIODS["test"]) & (log["query"] != "bad")]
    reds = tested[tested.colour == "red"]["query"].nunique()
    assert 0 < reds < tested["query"].nunique()
    assert sources.evaluation.test.slices["red"] == reds


def test_a_gate_and_a_search_join(places: Mapping[str, str], tmp_path: Path) -> None:
    """The verdict with every bound, and the trials, the best first, of a search with a failed one."""
    reason = f"all groups: {MARKUP}"
    check = Check(bound="margin", where="all", holds=False, reason=reason)
    verdict = GateVerdict(passed=False, primary="ndcg@5", checks=(check,), not_judged=("tv",), not_excluded=())
    with storage.Commit(str(tmp_path / "gate")) as commit:
        write_report(commit, verdict, Document("Gate", ()))
        commit.finish({"made_by": {}})
    history = History(str(tmp_path / "search"))
    history.open({})
    for number_, value in enumerate((0.3, None, 0.5)):
        history.begin(Trial(number=number_, params={} if number_ == 0 else {MARKUP: 0.125}))
        state = "complete" if value else "failed"
        history.end(number_, Result(state=state, value=value))
    found = document(places, gate=str(tmp_path / "gate"), search=history.url)
    assert set(left_out(found)) == {"Study"}
    tables = {s.name: [block for block in s.blocks if isinstance(block, Table)] for s in found.sections}
    assert tables["Gate"][0].rows == [["margin", "all", "broken", reason]]
    assert tables["Search"][0].header == ["trial", "metric", "state", "seconds", MARKUP]
    assert [[*row[:2], row[-1]] for row in tables["Search"][0].rows] == [
        ["2", "0.5000", "0.125"],
        ["0", "0.3000", "as given"],
    ]


@pytest.mark.nightly
def test_a_search_that_is_not_there_is_told_from_one_without_a_value(places: Mapping[str, str], tmp_path: Path) -> None:
    missing, begun = str(tmp_path / "misspelt"), History(str(tmp_path / "search"))
    begun.open({})
    for url, why in ((missing, "no search is there"), (begun.url, "no trial has a value yet")):
        (line,) = left_out(document(places, search=url))["Search"]
        assert line.startswith(f"{url}: {why}")


def test_curves_have_the_steps_of_the_run(places: Mapping[str, str]) -> None:
    """Those of head and full together, which the record counts on."""
    lines = records(str(Path(places["data"]).parent / "tuned"))
    phases = [line["phase"] for line in lines if "step" in line]
    assert phases == sorted(phases, key=["head", "full"].index)
    assert {*phases} == {"head", "full"}
    assert [step for step, _ in _curves_of(lines)["loss"]] == [*range(1, len(phases) + 1)]


def test_curves_continue_over_phases_and_forget_steps_that_were_run_again() -> None:
    def phase(name: str, loss: float, *steps: int) -> list[dict[str, Any]]:
        return [{"phase": name, "step": step, "loss": loss} for step in steps]

    ends = [{"phase": "head", "epoch": 1, "validation_map": 0.4}, {"phase": "full", "epoch": 1, "validation_map": 0.5}]
    first = [*phase("head", 3.0, 1, 2, 3, 2, 3), ends[0], *phase("full", 1.0, 4, 5), ends[1]]
    found = _curves_of(first)
    assert found["loss"] == [(1, 3.0), (2, 3.0), (3, 3.0), (4, 1.0), (5, 1.0)]
    assert found["validation_map"] == [(3, 0.4), (5, 0.5)]
    anew = phase("head", 2.0, 1, 2)
    assert _curves_of([*first, *anew]) == {"loss": [(1, 2.0), (2, 2.0)]}
    assert _curves_of([*first, *anew, ends[0], *phase("full", 1.0, 3, 4), ends[1]]) == {
        "loss": [(1, 2.0), (2, 2.0), (3, 1.0), (4, 1.0)],
        "validation_map": [(2, 0.4), (4, 0.5)],
    }
    trees = [{"tree": tree, "validation_map": value} for value, trees in ((0.5, 9), (0.6, 4)) for tree in range(trees)]
    assert _curves_of(trees) == {"validation_map": [(tree, 0.6) for tree in range(4)]}


def test_the_same_again_is_up_to_date_and_another_method_is_refused(places: Mapping[str, str]) -> None:
    settings = {"evaluation": places["evaluation"], "documents": 60}
    assert not ReportJob(out=places["page"], **settings).run()
    with pytest.raises(InputError, match="compare: the evaluation has no method 'other'; it has gbdt, "):
        ReportJob(out=places["page"], **settings, compare=("gbdt", "other")).run()
    assert storage.read_manifest(places["page"]) is not None


def test_what_is_up_to_date_is_shown_without_torch(places: Mapping[str, str]) -> None:
    for verb, out in (("evaluate", places["evaluation"]), ("report", places["page"])):
        code = f"import jobs.{verb}, jobs.cli, sys; jobs.cli.main(jobs.{verb}.COMMAND); print(*sys.modules)"
        command = [sys.executable, "-c", code, "--config", f"{out}/run/config.yaml", "--set", f"out={out}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert f"{verb}: {out} is up to date" in done.stderr
        assert {"torch", "ray", "scipy"}.isdisjoint(done.stdout.split())
