"""The sources of a report: the committed results, and the bundles, data and run records that they name.

Each raises an `InputError` if it is missing or unreadable; the section that needs it is replaced by that message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from ltrscale import storage
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.origin import read_as
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import AS_SHOWN, EvaluateConfig
from ltrscale.late import Late
from ltrscale.reports.document import LeftOut
from ltrscale.stages.provenance import Provenance
from ltrscale.stages.runs import LOG, METRICS, record_file, record_folder

if TYPE_CHECKING:
    from ltrscale import bundle
    from ltrscale.bundle import Bundle
    from ltrscale.ingest import leaks
    from ltrscale.ranking.single_feature import SingleFeature
else:
    bundle, leaks = Late("ltrscale.bundle"), Late("ltrscale.ingest.leaks")

_MUCH_GAIN = 0.03
"""Minimum share of the trees' gain for a feature to count as memorised."""


@dataclass(frozen=True)
class Sources:
    """The sources of a report."""

    url: str
    """Directory of the evaluation."""
    evaluation: Evaluation
    evaluated: EvaluateConfig
    compare: tuple[str, str] | None = None
    """The two methods to list groups of, if given."""
    _opened: dict[str, Bundle] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, url: str, compare: tuple[str, str] | None = None) -> Self:
        """Read the evaluation, which must have the methods in `compare`."""
        evaluation = Evaluation.read(url)
        names = [method.name for method in evaluation.methods]
        for name in compare or ():
            if name not in names:
                raise InputError(f"compare: the evaluation has no method {name!r}; it has {', '.join(names)}")
        return cls(url, evaluation, EvaluateConfig.recorded(url), compare)

    @property
    def methods(self) -> list[str]:
        """Method names, in the order of the evaluation."""
        return [method.name for method in self.evaluation.methods]

    def compared(self) -> tuple[str, str]:
        """The two methods to list groups of; by default the baseline and the best other one."""
        if self.compare is not None:
            return self.compare
        # labels favour the order that people saw, so its lead is not a fault of the model
        ranked = [method.name for method in self.evaluation.ranked if method.name != AS_SHOWN]
        if len(ranked) < 2:
            named = f", or name it and {AS_SHOWN} under compare" if AS_SHOWN in self.methods else ""
            raise InputError(f"the evaluation has one method; evaluate two to see where they differ{named}")
        first = next((name for name in ranked if name == self.evaluation.baseline), ranked[1])
        return first, next(name for name in ranked if name != first)

    def bundles(self) -> Iterator[tuple[str, str]]:
        """The first bundle of each method that has bundles: name and URL."""
        for method in self.evaluation.methods:
            if method.name not in (*self.evaluated.scores, AS_SHOWN):
                yield method.name, method.trials[0].url

    def opened(self, url: str) -> Bundle:
        """A bundle, opened once for all sections."""
        if url not in self._opened:
            self._opened[url] = bundle.load(url)
        return self._opened[url]

    @cached_property
    def single_features(self) -> list[SingleFeature]:
        """How well each feature alone ranks the test labels, best first."""
        evaluated = self.evaluated
        return leaks.examine_features(
            evaluated.splits.test, k=evaluated.primary_cutoff, relevant_from=evaluated.relevant_from
        )

    @cached_property
    def questions(self) -> Mapping[str, str]:
        """A question on each feature that ranks too well alone, best first, unless no method uses it."""
        by_feature = leaks.questions(self.single_features)
        if not by_feature or self.evaluated.scores:  # the features behind committed scores are unknown
            return by_feature
        try:
            used = {name for _, url in self.bundles() for name in self.opened(url).leans_on()}
        except InputError:
            return by_feature
        return {name: question for name, question in by_feature.items() if name in used}

    @cached_property
    def categories(self) -> Mapping[str, Mapping[int, str]]:
        """Category names by feature and code, as far as the test data sets record them."""
        return leaks.category_names(self.evaluation.test.data)

    @cached_property
    def memorised(self) -> Mapping[str, str]:
        """A sentence on each feature with much of the trees' gain that alone ranks like chance."""
        by_feature = {}
        of_methods, _ = self.importances
        for feature in self.single_features:
            shares = {method: of.get(feature.name, 0.0) for method, of in of_methods.items()}
            much = [f"{share:.0%} of the gain of {method}" for method, share in shares.items() if share >= _MUCH_GAIN]
            if feature.like_chance and much:
                by_feature[feature.name] = (
                    f"{feature.name} is probably memorised: it has {' and '.join(much)}, and alone it ranks like "
                    f"chance (NDCG@{feature.k} {feature.ndcg:.3f}, random order {feature.random:.3f})."
                )
        return by_feature

    @cached_property
    def importances(self) -> tuple[dict[str, dict[str, float]], list[LeftOut]]:
        """Column importances of each method with trees, and a line for each bundle that cannot be read."""
        found, unread = {}, []
        for method, url in self.bundles():
            try:
                if (of_method := self.opened(url).importances()) is not None:
                    found[method] = of_method
            except InputError as error:
                unread.append(LeftOut(f"{method}: {error}"))
        return found, unread

    @cached_property
    def gains_called(self) -> str:
        """The evaluation's name for document gains, such as revenue; empty if it does not use them."""
        if self.evaluated.gains != "column":
            return ""
        settings = read_as(open_dataset(self.evaluation.test.data[0]))
        return str(settings.get("source", {}).get("columns", {}).get("gain") or "gain")

    @cached_property
    def test(self) -> Selection:
        """The test groups, which must be those of the evaluation."""
        test = select(self.evaluated.splits.test, labelled=True)
        if test.hash != self.evaluation.test.hash:
            urls = ", ".join(self.evaluation.test.data)
            raise InputError(f"{urls}: the data has changed since the evaluation; run jobs.evaluate again")
        return test


def pretrained_for(bundle: Bundle) -> str | None:
    """The pretrained bundle that a network was finetuned from, if any."""
    for url in validate(Provenance, bundle.made_by, bundle.url).inputs:
        made_by = (storage.read_manifest(url) or {}).get("made_by", {})
        if made_by.get("stage") == "pretrain":
            return url
    return None


def records(url: str) -> list[Mapping[str, Any]]:
    """The metric records of a run, in order."""
    return [json.loads(line) for line in _recorded(url, METRICS).splitlines() if line.endswith("}")]


def minutes(url: str) -> float | None:
    """Minutes of a stage from its log, summed over all its finishes; None if it never finished."""
    seconds = re.findall(r": done in ([0-9.]+) s$", _recorded(url, LOG), re.MULTILINE)
    return sum(map(float, seconds)) / 60 if seconds else None


def _recorded(url: str, name: str) -> str:
    folder = record_folder(url)
    if folder is None or (text := record_file(folder, name)) is None:
        raise InputError(
            f"{url}: no run record ({name}); jobs leave it in run/ beside their output, copy it with the rest"
        )
    return text
