"""Sections on the data: outlier thresholds over their histograms, and what was quarantined."""

from collections.abc import Iterator

from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.parts import spread
from ltrscale.evaluation.measure.outliers import OUTLIER_BINS, histograms
from ltrscale.experiments.report.sources import Sources
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Charts, Table, Text

_HISTOGRAMS = 12
_DOCS_PER_BATCH = 65_536


def outliers(sources: Sources, documents: int) -> Iterator[Block]:
    """The rules of the evaluation over histograms of the validation split."""
    detector = sources.evaluation.detector
    how = (
        "by the named features only" if detector.gap is None else f"beyond {detector.gap} empty bins of {OUTLIER_BINS}"
    )
    yield Text(
        f"{len(detector.rules)} of {len(detector.features)} features have a rule, {how}; {detector.share:.2%} of the "
        "validation groups have a value beyond one and are outlier groups."
    )
    if not detector.rules:
        return
    rows = [
        [name, _shown(rule.below), _shown(rule.at_least), "yes" if rule.missing else "no"]
        for name, rule in detector.rules.items()
    ]
    header = ["feature", "outlier below", "outlier from", "missing is one"]
    yield Table(header, rows, caption="The rules", folded=len(rows) > _HISTOGRAMS)
    whole = select(sources.evaluated.splits.validation, labelled=False)
    sample = spread(whole, documents=documents)
    known = [f.name for f in sample.features if f.name in detector.rules and f.kind == "numeric"][:_HISTOGRAMS]
    places = {[f.name for f in sample.features].index(name): name for name in known}
    found = histograms(lambda: iterate(sample, docs_per_batch=_DOCS_PER_BATCH), list(places))
    shown = []
    for column, name in places.items():
        if (histogram := found.get(column)) is not None:
            rule = detector.rules[name]
            spec = charts.histogram(
                histogram.counts_B.tolist(),
                histogram.edges_B1.tolist(),
                title=name,
                below=rule.below,
                at_least=rule.at_least,
            )
            shown.append(Chart(spec, f"{name}: documents by value; outliers are red"))
    yield Charts(shown)
    of = f"{sample.n_documents:,} of {whole.n_documents:,} documents of the validation split"
    more = f", the first {_HISTOGRAMS} features with a rule" if len(detector.rules) > len(shown) else ""
    yield Text(f"Counts are of {of}{more}. Rules were fitted on all of them.")


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def quarantine(sources: Sources) -> Iterator[Block]:
    """Rows and groups read, kept and rejected by each data set, the rules that rejected them, and what texts lost."""
    splits = sources.evaluated.splits.by_name.values()
    rows, rules, texts = [], [], []
    for url in dict.fromkeys(url for split in splits for url in split.data):
        manifest = open_dataset(url).manifest
        a = manifest.accounting
        counts = (a.rows_in, a.rows_kept, a.rows_rejected, a.rows_merged, a.groups_in, a.groups_kept, a.groups_rejected)
        rows.append([url, *(f"{n:,}" for n in counts), f"{len(manifest.quarantine)}"])
        rules += [[url, rule, f"{n:,}"] for rule, n in a.rules.items()]
        for column, found in manifest.token_summaries.items():
            of_texts = (found.lists, found.empty, found.tokens, found.longest, found.cut_lists, found.cut_tokens)
            texts.append([url, column, *(f"{n:,}" for n in of_texts)])
    header = ["data set", "rows", "kept", "rejected", "merged", "groups", "kept groups", "rejected groups", "files"]
    yield Table(header, rows, caption="Rows are kept, rejected, or merged with another row of their document")
    if rules:
        yield Table(["data set", "rule", "rows"], rules, caption="Why rows were rejected")
    else:
        yield Text("No rule has rejected a row.")
    if texts:
        header = ["data set", "tokens", "texts", "empty", "tokens kept", "longest", "texts cut", "tokens cut"]
        yield Table(header, texts, caption="Texts of queries and documents")
