"""The sources of a report: the committed results, and the bundles, data and run records that they name.

Each raises an `InputError` where it is missing or cannot be read; the section that needs it is left out with that line.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ltrscale import storage
from ltrscale.bundle import Bundle, load
from ltrscale.bundle.contents import Provenance
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.origin import read_as
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.report import Evaluation, MethodResult
from ltrscale.evaluation.measure.settings import AS_SHOWN, EvaluateConfig
from ltrscale.evaluation.weeks.verdict import importances_of, leaning
from ltrscale.ingest.outcome import category_names, look_alone, questions
from ltrscale.ranking.alone import SingleFeature
from ltrscale.stages.runs import LOG, METRICS, record_file, record_folder

_MUCH_GAIN = 0.03
"""Share of the gain of trees, from which on a feature that says nothing alone is named."""

SUMMARY = "summary"
"""The directory of a study's results, below its own."""


@dataclass(frozen=True)
class Sources:
    """What a report is made from."""

    url: str
    """Directory of the evaluation."""
    evaluation: Evaluation
    evaluated: EvaluateConfig
    """The config of the evaluation."""
    compare: tuple[str, str] | None = None
    """The methods whose groups are listed, where they are named."""
    _opened: dict[str, Bundle] = field(default_factory=dict, repr=False)

    @staticmethod
    def open(url: str, compare: tuple[str, str] | None = None) -> "Sources":
        """Read the evaluation, which must have the methods to compare."""
        evaluation = Evaluation.read(url)
        names = [method.name for method in evaluation.methods]
        for name in compare or ():
            if name not in names:
                raise InputError(f"compare: the evaluation has no method {name!r}; it has {', '.join(names)}")
        return Sources(url, evaluation, EvaluateConfig.recorded(url), compare)

    @property
    def primary(self) -> str:
        """The metric of comparisons."""
        return self.evaluation.primary

    @property
    def methods(self) -> list[str]:
        """The names of the methods, in the order of the evaluation."""
        return [method.name for method in self.evaluation.methods]

    @property
    def others(self) -> list[MethodResult]:
        """The methods other than the baseline."""
        return [method for method in self.evaluation.methods if method.name != self.evaluation.baseline]

    def compared(self) -> tuple[str, str]:
        """The two methods whose groups are listed: the baseline and the best other one, unless others are named."""
        if self.compare is not None:
            return self.compare
        # labels of people who saw the order that was shown favour it: where it is ahead, no model is at fault
        ranked = [method.name for method in self.evaluation.ranked if method.name != AS_SHOWN]
        if len(ranked) < 2:
            named = f", or name {AS_SHOWN} and it under compare" if AS_SHOWN in self.methods else ""
            raise InputError(f"the evaluation has one method; evaluate two to see where they differ{named}")
        first = next((name for name in ranked if name == self.evaluation.baseline), ranked[1])
        return first, next(name for name in ranked if name != first)

    def bundles(self) -> Iterator[tuple[str, str]]:
        """The first bundle of each method that has bundles: name and URL."""
        for method in self.evaluation.methods:
            if method.name not in (*self.evaluated.scores, AS_SHOWN):
                yield method.name, method.bundles[0]

    def opened(self, url: str) -> Bundle:
        """A bundle, opened once for all sections."""
        if url not in self._opened:
            self._opened[url] = load(url)
        return self._opened[url]

    @cached_property
    def alone(self) -> list[SingleFeature]:
        """What each feature says of the test labels by itself, the best first."""
        evaluated = self.evaluated
        return look_alone(evaluated.splits.test, k=evaluated.primary_cutoff, relevant_from=evaluated.relevant_from)

    @cached_property
    def questions(self) -> Mapping[str, str]:
        """What to ask of each feature that ranks too well alone, the best first, unless no method can lean on it."""
        by_feature = questions(self.alone)
        if not by_feature or self.evaluated.scores:  # nobody knows what committed scores are made of
            return by_feature
        try:
            used = {name for _, url in self.bundles() for name in leaning(self.opened(url))}
        except InputError:
            return by_feature
        return {name: question for name, question in by_feature.items() if name in used}

    @cached_property
    def categories(self) -> Mapping[str, Mapping[int, str]]:
        """The texts of categorical features by their codes, as far as the test data sets have recorded them."""
        return category_names(self.evaluation.test.data)

    @cached_property
    def memorised(self) -> Mapping[str, str]:
        """A sentence on each feature to which trees give much of their gain, and which alone says nothing."""
        by_feature = {}
        for feature in self.alone:
            shares = {method: of.get(feature.name, 0.0) for method, of in self.importances.items()}
            much = [f"{share:.0%} of the gain of {method}" for method, share in shares.items() if share >= _MUCH_GAIN]
            if feature.like_chance and much:
                by_feature[feature.name] = (
                    f"{feature.name} is probably memorised: it has {' and '.join(much)}, and alone it ranks like "
                    f"chance (NDCG@{feature.k} {feature.ndcg:.3f}, random order {feature.random:.3f})."
                )
        return by_feature

    @cached_property
    def importances(self) -> Mapping[str, Mapping[str, float]]:
        """The importance of each column to the trees of each method that has trees, as far as bundles can be read."""
        found = {}
        for method, url in self.bundles():
            with suppress(InputError):
                found[method] = importances_of(self.opened(url))
        return {method: of for method, of in found.items() if of is not None}

    @cached_property
    def gains_called(self) -> str:
        """What the evaluation calls a document's own gain, such as revenue; empty where it does not measure by it."""
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
    """The pretrained bundle that a network was finetuned from; None if it learnt from labels alone."""
    for url in validate(Provenance, bundle.made_by, bundle.url).inputs:
        made_by = (storage.read_manifest(url) or {}).get("made_by", {})
        if made_by.get("stage") == "pretrain":
            return url
    return None


def records(url: str) -> list[Mapping[str, Any]]:
    """What a run has recorded of its metrics, in order."""
    return [json.loads(line) for line in _recorded(url, METRICS).splitlines() if line.endswith("}")]


def minutes(url: str) -> float | None:
    """Minutes of the stage, as its log says: of all its parts, if it was interrupted and resumed after a finish."""
    seconds = re.findall(r": done in ([0-9.]+) s$", _recorded(url, LOG), re.MULTILINE)
    return sum(map(float, seconds)) / 60 if seconds else None


def _recorded(url: str, name: str) -> str:
    folder = record_folder(url)
    if folder is None or (text := record_file(folder, name)) is None:
        raise InputError(
            f"{url}: no run record ({name}); jobs leave it in run/ beside their output, copy it with the rest"
        )
    return text
