"""The page of a study whose figures are known: test and validation prefer different methods."""

import itertools
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reference.crossed import interval, mean

from ltrscale import storage
from ltrscale.evaluation.measure.outliers import OutlierDetector
from ltrscale.evaluation.measure.report import EvaluatedData
from ltrscale.evaluation.studies.measured import Measured, TestedOn
from ltrscale.evaluation.studies.study import Cost, Design, Family, MethodTraits, Model, Study, _Table, study_of
from ltrscale.evaluation.studies.study_page import _deciding, _worse_with_more, costs, curves, document, sentences
from ltrscale.reports.document import Table
from ltrscale.reports.findings import Findings
from ltrscale.reports.render import markdown
from ltrscale.texts import escape

NUMBERS = ("10", "100", "1000")
OUTLIER_Q = (False, False, False, True, True, True)
"""Half of the test groups."""
EASY_Q = (0.30, 0.10, 0.20, -0.30, -0.10, -0.20)
"""How much easier than the mean a group is for every method: it drops out of differences."""
DRAWS = 5
SOFT, HARD = "{kind: gaussian}", "{kind: zeroing}"


def about(family: Family, **more: str) -> MethodTraits:
    return MethodTraits.model_validate({"family": family, **more})


METHODS = {
    "gbdt": about("trees", unlabelled="none"),
    "gbdt_pca": about("trees", unlabelled="PCA"),
    "scratch": about("not pretrained"),
    "scratch_heads": about("not pretrained"),
    "simclr": about("pretrained", pretext="simclr", augment=SOFT, strategy="FF"),
    "zeroing": about("pretrained", pretext="simclr", augment=HARD, strategy="FF"),
    "probed": about("pretrained", pretext="simclr", augment=SOFT, strategy="LP"),
    "heads": about("pretrained", pretext="simsiam", augment=SOFT, strategy="FF"),
    "stack": about("mixed"),
}
TEST = {  # mean of the test metric, by number
    "gbdt": (0.50, 0.50, 0.50),
    "gbdt_pca": (0.51, 0.49, 0.48),
    "scratch": (0.52, 0.52, 0.48),
    "scratch_heads": (0.55, 0.55, 0.56),
    "simclr": (0.56, 0.56, 0.45),
    "zeroing": (0.60, 0.60, 0.60),
    "probed": (0.49, 0.51, 0.52),
    "heads": (0.499, 0.501, 0.55),
    "stack": (0.58, 0.52, 0.46),
}
VALIDATION = {  # zeroing, the best on test, is never chosen; heads, the worst of the pretrained ones at 10, is
    **dict.fromkeys(METHODS, (0.40, 0.40, 0.40)),
    "gbdt_pca": (0.30, 0.41, 0.30),
    "scratch": (0.41, 0.41, 0.41),
    "simclr": (0.50, 0.60, 0.60),
    "heads": (0.60, 0.50, 0.50),
    "stack": (0.39, 0.39, 0.39),
}
CONTROLS = {"simclr": "scratch", "probed": "scratch", "heads": "scratch_heads"}
NOISE = {"probed": 0.2}
"""Size of what differs between draws and groups, where it is not small."""


def table(method: str, number: str) -> list[list[float]]:
    """The metric by group and draw; the parts of draws and of the rest have a mean of 0."""
    at, size = TEST[method][NUMBERS.index(number)], NOISE.get(method, 0.01)
    own = list(METHODS).index(method)
    draw = [(t - 2) * (-1) ** own for t in range(DRAWS)]
    rest = [[math.cos(1 + own + q * (t + 1)) for t in range(DRAWS)] for q in range(len(EASY_Q))]
    whole = mean([mean(row) for row in rest])
    return [
        [at + easy + size * (0.2 * draw[t] + rest[q][t] - whole) for t in range(DRAWS)] for q, easy in enumerate(EASY_Q)
    ]


def difference(method: str, other: str, number: str) -> list[list[float]]:
    pairs = zip(table(method, number), table(other, number), strict=True)
    return [[x - y for x, y in zip(*rows, strict=True)] for rows in pairs]


def shown(method: str, other: str, number: str) -> str:
    return "{:+.4f} [{:+.4f}, {:+.4f}]".format(*interval(difference(method, other, number)))


def cell(method: str, number: str, rows: Sequence[int] = range(len(EASY_Q))) -> str:
    """Mean and standard error over the draws of some groups."""
    of_draws = [mean([table(method, number)[q][t] for q in rows]) for t in range(DRAWS)]
    middle = mean(of_draws)
    error = math.sqrt(sum((x - middle) ** 2 for x in of_draws) / (DRAWS - 1) / DRAWS)
    return f"{middle:.4f} ± {error:.4f}"


def commit(found: Findings, columns: Mapping[str, Any], out: Path) -> str:
    with storage.Commit(str(out)) as written:
        with written.file("groups.parquet") as path:
            pq.write_table(pa.table(columns), path)
        with written.file(found.file) as path:
            path.write_text(found.model_dump_json())
        written.finish({})
    return str(out)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The metrics of all models, each in a directory, and the test groups."""
    folder = tmp_path_factory.mktemp("measured")
    gids = np.arange(len(EASY_Q), dtype=np.int64)
    counts = {"groups": 6, "documents": 60, "slices": {"all": 6, "outliers": 3}}
    test = EvaluatedData(data=("set",), periods=("w4",), hash="0" * 64, **counts)
    detector = OutlierDetector(data="", features=(), gap=None, share=0.5, rules={})
    commit(TestedOn(test=test, detector=detector), {"gid": gids, "outlier": OUTLIER_Q}, folder / "test")
    for method, (i, number) in itertools.product(METHODS, enumerate(NUMBERS)):
        known = {"metrics": ("ndcg@5",), "labelled_groups": int(number), "documents": 60, "seconds": 0.5}
        about_model = Measured.model_validate({**known, "validation": {"ndcg@5": VALIDATION[method][i]}})
        values_QT = table(method, number)
        for draw in range(DRAWS):
            columns = {"gid": gids, "ndcg@5": [row[draw] for row in values_QT]}
            commit(about_model, columns, folder / f"{method}-{number}-{draw}")
    return folder


def study(
    measured: Path,
    *,
    names: Sequence[str] = tuple(METHODS),
    controls: Mapping[str, str] = CONTROLS,
    baseline: str | None = "gbdt",
    draws: int = DRAWS,
    only: Mapping[str, str] | None = None,
    pretraining: int | None = None,
    labelled: Mapping[str, float | None] | None = None,
) -> Study:
    """The study of these figures; the methods of `only` are measured at one number. Each draw has its own pretraining,
    or all have the one that is given."""
    models = [
        Model(
            labelled=number,
            draw=draw,
            pretraining=pretraining if METHODS[method].family == "pretrained" else None,
            method=method,
            url=str(measured / f"{method}-{number}-{draw}"),
            seconds=60 + draw,
            documents=0 if METHODS[method].family == "trees" else 300,
        )
        for method, number, draw in itertools.product(names, NUMBERS, range(draws))
        if (only or {}).get(method, number) == number
    ]
    design = Design(
        labelled=labelled or {number: float(number) for number in NUMBERS},
        methods={name: METHODS[name] for name in names},
        counts="labelled",
        validation_share=None,
        validation_size={},
        baseline=baseline,
        controls=dict(controls),
        primary="ndcg@5",
        policies={"ndcg@5": ""},
        planned=len(models),
        failed={},
        pretraining={"simclr": Cost(pretraining_minutes=2.5, pretraining_documents_per_s=1234.0)},
    )
    return study_of(design, models, str(measured / "test"))


@pytest.fixture(scope="module")
def found(measured: Path) -> Study:
    return study(measured)


def section(text: str, title: str) -> str:
    """The part of a page under a heading that begins so."""
    (part,) = [part for part in text.split("\n## ") if part.startswith(title)]
    return part


def page(found: Study) -> str:
    """The report in Markdown."""
    return markdown(document(found))


def cells(part: str) -> list[dict[str, list[str]]]:
    """The tables of a part of a page: cells by the first of their row, without header and ruler."""
    tables = [block.splitlines() for block in part.split("\n\n") if block.startswith("| ")]
    rows = [[[c.strip() for c in line.strip("|").split(" | ")] for line in lines[2:]] for lines in tables]
    return [{name: rest for name, *rest in each} for each in rows]


TREES_AND_ONE = {"names": ("gbdt", "scratch", "simclr"), "controls": {"simclr": "scratch"}}
CASES: dict[str, dict[str, Any]] = {
    "all methods; zeroing would win everywhere, but validation never chooses it": {},
    "one method ahead, then behind": TREES_AND_ONE,
    "four draws": {**TREES_AND_ONE, "draws": 4},
    "one encoder": {**TREES_AND_ONE, "pretraining": 0},
    "noise at each number": {"names": ("gbdt", "probed"), "controls": {}},
    "measured at one number": {**TREES_AND_ONE, "only": {"simclr": "100"}},
    "controls alone": {**TREES_AND_ONE, "names": ("scratch", "simclr"), "baseline": None},
    "neither baseline nor controls": {"names": ("scratch", "simclr"), "controls": {}, "baseline": None},
    "untuned trees over four draws": {"names": ("gbdt", "gbdt_pca"), "controls": {}, "draws": 4},
    "untuned trees of one draw, of which nothing is known": {
        "names": ("gbdt", "gbdt_pca"),
        "controls": {},
        "draws": 1,
    },
}
GOLDEN = Path(__file__).with_name("advice.txt")
"""The sentences of each case; read a change of it as a reader of a report would."""


def advised(measured: Path) -> str:
    said = {name: "\n".join(sentences(study(measured, **case))) for name, case in CASES.items()}
    return "\n\n".join(f"[{name}]\n{sentences}" for name, sentences in said.items()) + "\n"


@pytest.mark.slow
def test_every_case_is_advised_as_it_should(measured: Path) -> None:
    assert advised(measured) == GOLDEN.read_text()


def test_the_figures_of_the_advice_have_the_verdicts_that_the_oracle_gives() -> None:
    """The other tests compare with words that rest on these."""
    signs = {}
    for method, other, number in [
        *(("simclr", "gbdt", number) for number in NUMBERS),
        ("heads", "gbdt", "10"),
        *(("probed", "gbdt", number) for number in NUMBERS),
        ("heads", "scratch_heads", "10"),
        ("simclr", "scratch", "100"),
        ("simclr", "scratch", "1000"),
    ]:
        middle, low, high = interval(difference(method, other, number))
        expected = TEST[method][NUMBERS.index(number)] - TEST[other][NUMBERS.index(number)]
        assert middle == pytest.approx(expected)
        signs[method, other, number] = 1 if low > 0 else -1 if high < 0 else 0
    assert list(signs.values()) == [1, 1, -1, 0, 0, 0, 0, -1, 1, -1]


@pytest.mark.slow
def test_differences_are_from_the_baseline_and_from_each_control(found: Study) -> None:
    text = page(found)
    assert all(f"\n{escape(sentence)}\n" in text for sentence in sentences(found))
    of_scratch = cells(section(text, "Against scratch, which is not pretrained"))[0]
    assert of_scratch == {name: [shown(name, "scratch", n) for n in NUMBERS] for name in ("simclr", "probed")}
    of_heads = cells(section(text, "Against scratch_heads, which is not pretrained"))[0]
    assert of_heads == {"heads": [shown("heads", "scratch_heads", n) for n in NUMBERS]}
    assert {(v.method, v.against) for v in found.versus if v.against != "gbdt"} == set(CONTROLS.items())


@pytest.mark.slow
def test_without_a_validation_metric_none_is_advised(found: Study) -> None:
    unreported = found.replace(points=[{**point.model_dump(), "validation": None} for point in found.points])
    against, share = sentences(unreported)[:2]
    assert against.startswith("No method reports NDCG@5 on validation, by which one would be chosen: set the methods'")
    assert share == f"Pretraining's own share: {against}"


def test_one_encoder_judges_no_share(measured: Path, found: Study) -> None:
    one = study(measured, **CASES["one encoder"])
    assert all(e.p is None for e in one.against("scratch")["simclr"].estimates.values())
    assert {(c.low, c.high) for c in one.against("scratch")["simclr"].crossovers} == {(None, None)}
    assert "crossed with 1 pretraining;" in page(one)
    assert "each with its own pretraining" in page(found)


def test_draws_with_the_same_pretrainings_count_where_others_are_missing(measured: Path) -> None:
    """As in the middle of a study, or where a model failed: no draw has all three, and two have the same two."""
    found = {0: (0, 1), 1: (0, 2), 2: (0, 1)}
    models = [
        Model(
            labelled="10",
            draw=draw,
            pretraining=pretraining,
            method="simclr",
            url=str(measured / f"simclr-10-{draw}"),
            seconds=None,
            documents=0,
        )
        for draw, pretrainings in found.items()
        for pretraining in pretrainings
    ]
    table = _Table.read(models, str(measured / "test"), "ndcg@5")
    drawn = table.drawn("simclr", "10", "ndcg@5", "all")
    assert (drawn.draws, drawn.values_QTP.shape[2], table.crossed["10", "simclr"]) == ((0, 2), 2, (0, 1))


@pytest.mark.slow
def test_a_number_that_no_model_states_is_in_tables_and_in_no_chart_and_no_crossover(
    measured: Path, tmp_path: Path
) -> None:
    """As with shares of all groups, if their bundles come from elsewhere: two of them are not at the same place."""
    names = ("gbdt", "simclr")
    shutil.copytree(measured, tmp_path, dirs_exist_ok=True)
    gids = np.arange(len(EASY_Q), dtype=np.int64)
    for method, number, draw in itertools.product(names, ("100", "1000"), range(DRAWS)):
        out = tmp_path / f"{method}-{number}-{draw}"
        columns = {"gid": gids, "ndcg@5": [row[draw] for row in table(method, number)]}
        commit(Measured.read(str(out)).replace(labelled_groups=None), columns, out)
    found = study(tmp_path, names=names, controls={}, labelled=dict.fromkeys(NUMBERS))
    assert found.labelled == {"10": 10.0, "100": None, "1000": None}
    versus = found.against("gbdt")["simclr"]
    assert list(versus.estimates) == list(NUMBERS)
    assert versus.crossovers == ()
    part = cells(section(page(found), "Against gbdt"))
    assert part[0]["simclr"] == [shown("simclr", "gbdt", n) for n in NUMBERS]
    for chart in curves(found):
        assert {round(row["x"]) for row in chart.spec["data"]["values"]} == {10}
    assert not list(curves(found.replace(labelled=dict.fromkeys(NUMBERS))))


def test_trees_that_get_worse_by_two_errors_and_are_not_tuned_are_remarked_on(found: Study) -> None:
    """gbdt_pca falls from .51 to .48; networks that fall more, and trees that stay, are not its business."""
    first, last = (cell("gbdt_pca", number) for number in ("10", "1000"))
    errors = 0.03 / math.hypot(*(float(text.split(" ± ")[1]) for text in (first, last)))
    (remark,) = _worse_with_more(found)
    rest = remark.removeprefix(
        f"gbdt_pca gets worse with more labels: NDCG@5 {first[:6]} at 10 and {last[:6]} at 1000 labelled groups ("
    )
    assert float(rest.split(" ")[0]) == pytest.approx(errors, rel=0.03)  # of errors with four digits
    tuned = {**found.methods, "gbdt_pca": found.methods["gbdt_pca"].replace(tuned=True)}
    assert _worse_with_more(found.replace(methods=tuned)) == []


def crossings(found: Study, other: str) -> dict[str, list[str]]:
    """What the page says on each method's crossovers, on all groups."""
    return cells(section(page(found), f"Against {other}"))[2]


def test_a_crossover_is_interpolated_and_its_interval_are_the_numbers_that_the_oracle_does_not_reject(
    found: Study,
) -> None:
    """From +.06 at 100 to -.05 at 1,000 it is 6/11 of the way, in the logarithm."""
    ends = [difference("simclr", "gbdt", number) for number in ("100", "1000")]
    rejected = []
    for step in range(65):
        share = step / 64
        values = [[x * (1 - share) + y * share for x, y in zip(*rows, strict=True)] for rows in zip(*ends, strict=True)]
        _, low, high = interval(values)
        if low > 0 or high < 0:
            rejected.append(100 * 10**share)
    at = 100 * 10 ** (6 / 11)
    low, high = max(n for n in rejected if n < at), min(n for n in rejected if n > at)
    assert 100 < low < at < high < 1000
    assert crossings(found, "gbdt")["simclr"] == ["falls behind", *(f"{n:,.0f}" for n in (at, low, high))]


def test_crossovers_of_all_kinds(found: Study) -> None:
    of_gbdt, between = crossings(found, "gbdt"), f"{math.sqrt(10 * 100):.0f}"
    assert of_gbdt["gbdt_pca"][:2] == ["falls behind", between]
    assert of_gbdt["probed"] == ["overtakes", between, "-", "-"]
    assert of_gbdt["zeroing"] == ["ahead throughout", "-", "-", "-"]
    assert crossings(found, "scratch_heads") == {"heads": ["behind throughout", "-", "-", "-"]}


def test_the_page_says_what_would_decide_each_open_difference(found: Study) -> None:
    open_ones = {
        (f"{v.method} - {v.against}", n): e
        for v in found.versus
        for n, e in v.estimates.items()
        if v.groups == "all" and e.verdict == "open"
    }
    rows = [row for against in found.opponents for row in _deciding(found, against)]
    assert len(rows) == len(open_ones) > 3
    for row in rows:
        e = open_ones[str(row["method"]), str(row["labelled groups"])]
        assert e.needs is not None
        assert (row["difference"], row["draws"], row["decided by draws"]) == (f"{e.mean:+.4f}", 5, e.needs.draws)
    assert Table.from_rows(rows).rows in [block.rows for block in document(found).opening if isinstance(block, Table)]


def test_what_is_measured_at_one_number_is_judged_there(measured: Path) -> None:
    one = study(measured, **CASES["measured at one number"])
    assert crossings(one, "scratch") == {"simclr": ["measured at 100 only", "-", "-", "-"]}
    assert cells(page(one))[0]["simclr"] == ["-", cell("simclr", "100"), "-"]


def test_percent_of_the_baseline(found: Study) -> None:
    (everywhere, _) = cells(section(page(found), "Percent of gbdt (HOU24, table 3)"))
    assert set(everywhere) == set(METHODS)
    assert everywhere["gbdt"] == ["+0.00%"] * 3
    ends = [interval(difference("simclr", "gbdt", n))[1:] for n in NUMBERS]
    assert everywhere["simclr"] == [
        f"{percent} [{100 * low / 0.5:+.2f}%, {100 * high / 0.5:+.2f}%]"
        for percent, (low, high) in zip(("+12.00%", "+12.00%", "-10.00%"), ends, strict=True)
    ]


TABLES: dict[str, dict[str, str | tuple[str, str, str]]] = {
    "The best of each family, chosen on validation (HOU24, table 2)": {
        "GBDT": ("gbdt", "gbdt_pca", "gbdt"),
        "No pretrain DL": "scratch",
        "Pretrained DL": ("heads", "simclr", "simclr"),
    },
    "Strategies of finetuning (HOU24, table 4)": {
        "full finetuning: heads": "heads",
        "full finetuning: simclr": "simclr",
        "full finetuning: zeroing": "zeroing",
        "linear probing: probed": "probed",
    },
    "Augmentations of simclr (HOU24, tables 14 and 15)": {f"{SOFT}: simclr": "simclr", f"{HARD}: zeroing": "zeroing"},
    "Trees with and without unlabelled groups (HOU24, table 16)": {"PCA: gbdt_pca": "gbdt_pca", "none: gbdt": "gbdt"},
}
"""Titles, and the method of each row, or its methods by number."""


@pytest.mark.parametrize("title", TABLES)
def test_tables_in_the_papers_shape(found: Study, title: str) -> None:
    everywhere, of_outliers = cells(section(page(found), title))
    outliers = [q for q, outlier in enumerate(OUTLIER_Q) if outlier]
    rows = {row: (of,) * 3 if isinstance(of, str) else of for row, of in TABLES[title].items()}
    assert list(everywhere) == list(of_outliers) == list(rows)
    for row, methods in rows.items():
        assert everywhere[row] == [cell(m, n) for m, n in zip(methods, NUMBERS, strict=True)]
        assert of_outliers[row] == [cell(m, n, outliers) for m, n in zip(methods, NUMBERS, strict=True)]


def test_tables_for_which_there_is_one_row_are_left_out(found: Study, measured: Path) -> None:
    assert "Augmentations of simsiam" not in page(found)
    text = page(study(measured, names=("gbdt", "simclr", "heads"), controls={}))
    assert "(HOU24, table 2)" in text
    assert not [n for n in ("table 4)", "tables 14", "table 16") if n in text]


def test_the_cost_of_trees_has_no_documents(measured: Path) -> None:
    """A model takes 60 to 64 s for 300 documents; 60 are scored in half a second."""
    names = ("gbdt", "scratch", "simclr", "probed")
    table = costs(study(measured, names=names, controls={}, only={"simclr": "100", "probed": "1"}))
    assert table.header == [
        "method",
        "pretraining, min",
        "pretraining, documents/s",
        "10, min",
        "100, min",
        "1000, min",
        "training, documents/s",
        "scoring, documents/s",
    ]
    assert table.rows == [
        ["gbdt", "-", "-", "1.03", "1.03", "1.03", "n/a", "120"],
        ["scratch", "-", "-", "1.03", "1.03", "1.03", "5", "120"],
        ["simclr", "2.50", "1,234", "-", "1.03", "-", "5", "120"],
        ["probed", "-", "-", "-", "-", "-", "-", "-"],
    ]


@pytest.mark.slow
def test_the_page_names_differences_whose_draws_look_skewed(measured: Path) -> None:
    """By their number: as many as chance gives are not worth a line."""
    found = study(measured)
    judged = [(i, n) for i, v in enumerate(found.versus) if v.groups == "all" for n in v.estimates]

    def skewed(count: int) -> str:
        marked = set(judged[:count])
        versus = [
            v.replace(estimates={n: e.replace(skewed=(i, n) in marked) for n, e in v.estimates.items()})
            for i, v in enumerate(found.versus)
        ]
        return page(found.replace(versus=tuple(versus)))

    few, many = 1, len(judged) // 3
    assert "look skewed" not in skewed(0)
    assert "look skewed" not in skewed(few)
    assert f"Draws of labels look skewed in {many} of {len(judged)} differences (gbdt_pca - gbdt at 10, " in skewed(
        many
    )
