"""Why a document stands above others of its list: what each feature adds to the difference of their scores, in words.

Shapes: Q groups, P pairs of documents, F features.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.bundle.opened import Bundle, Computing, Explainer, Scorer, scorers_of
from ltrscale.config import Strict
from ltrscale.data.dataset.manifest import Feature
from ltrscale.models.contributions import Contributions

BESIDE = "text, position and order"
"""Name for what two documents have besides their features."""
_NEGLIGIBLE = 1e-3
"""Share of the largest part below which a part is float32 noise."""
_SAID, _WORTH_SAYING = 3, 0.05
"""Number of reasons in a sentence, and the minimum share of the largest one."""
_IN_TABLE = 10
_COLUMNS = pa.schema(
    {
        "query_id": pa.string(),
        "item_id": pa.string(),
        "against_id": pa.string(),
        "others": pa.int32(),
        "difference": pa.float64(),
        "feature": pa.string(),
        "value": pa.string(),
        "against": pa.string(),
        "adds": pa.float64(),
    }
)


class FeaturePart(Strict):
    """What one feature adds to the lead of a document over others."""

    feature: str
    value: str
    """Of the document, as in the data; `none` if it is missing."""
    against: str
    """Of the other document; for several, the median, or the most frequent other category with its count."""
    adds: float


class Explanation(Strict):
    """The difference of a document's score from that of another one of its list, or from the mean of several."""

    query: str
    item: str
    against: str | None
    """The other document; None for several."""
    others: int
    """Number of documents that it is compared with."""
    difference: float
    reasons: tuple[FeaturePart, ...]
    """They add up to the difference, the largest first."""

    def sentence(self) -> str:
        """The difference in words, with at most three reasons for it and two against it, the largest of each.

        Example:
            >>> price = FeaturePart(feature="price", value="9.99", against="24", adds=0.8)
            >>> rating = FeaturePart(feature="rating", value="3.9", against="4.6", adds=-0.25)
            >>> reasons = (price, rating)
            >>> Explanation(query="q", item="A", against="B", others=1, difference=0.55, reasons=reasons).sentence()
            'A stands above B because price 9.99 (against 24) adds 0.8; rating 3.9 (against 4.6) takes 0.25 away.'
        """
        others = self.against or f"the next {self.others}"
        sign = -1 if self.difference < 0 else 1
        least = _WORTH_SAYING * max((abs(reason.adds) for reason in self.reasons), default=0.0)
        why = [reason for reason in self.reasons if sign * reason.adds > least][:_SAID]
        if not why:
            return f"{self.item} stands level with {others}: no feature tells them apart."
        but = [reason for reason in self.reasons if sign * reason.adds < -least][: _SAID - 1]
        place = "above" if sign > 0 else "below"
        text = f"{self.item} stands {place} {others} because {_listed(why)}"
        return f"{text}; {_listed(but)}." if but else f"{text}."


def _listed(reasons: Sequence[FeaturePart]) -> str:
    texts = []
    for reason in reasons:
        values = f" {reason.value} (against {reason.against})" if reason.value else ""
        adds = f"adds {reason.adds:.2g}" if reason.adds > 0 else f"takes {-reason.adds:.2g} away"
        texts.append(f"{reason.feature}{values} {adds}")
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts)


class Driver(Strict):
    """What a feature adds on average over some explanations."""

    feature: str
    adds: float
    """Mean over the explanations; one without the feature counts 0."""
    share: float
    """Share of the mean difference; shares add up to 1, and one against the lead is negative."""
    first: float
    """Share of the explanations in which no feature adds more."""


def drivers_of(explanations: Sequence[Explanation]) -> tuple[Driver, ...]:
    """What drives the lead over some explanations, the largest mean first; empty without a lead.

    Example:
        >>> about, of_one = {"query": "q", "item": "x", "against": "y", "others": 1}, {"value": "1", "against": "0"}
        >>> reasons = [FeaturePart(feature="a", adds=3.0, **of_one)], [FeaturePart(feature="b", adds=1.0, **of_one)]
        >>> both = [Explanation(difference=r[0].adds, reasons=r, **about) for r in reasons]
        >>> [(driver.feature, driver.adds, driver.share, driver.first) for driver in drivers_of(both)]
        [('a', 1.5, 0.75, 0.5), ('b', 0.5, 0.25, 0.5)]
    """
    total = sum(each.difference for each in explanations)
    if total <= 0:
        return ()
    sums, firsts = Counter[str](), Counter[str]()
    for each in explanations:
        sums.update({reason.feature: reason.adds for reason in each.reasons})
        firsts.update([max(each.reasons, key=lambda reason: reason.adds).feature] if each.reasons else [])
    n = len(explanations)
    drivers = (Driver(feature=f, adds=v / n, share=v / total, first=firsts[f] / n) for f, v in sums.items())
    return tuple(sorted(drivers, key=lambda driver: -abs(driver.adds)))


def as_table(explanations: Sequence[Explanation]) -> pa.Table:
    """A row for each of the ten largest reasons of each explanation."""
    rows = [
        {
            "query_id": each.query,
            "item_id": each.item,
            "against_id": each.against,
            "others": each.others,
            "difference": each.difference,
            **reason.model_dump(),
        }
        for each in explanations
        for reason in each.reasons[:_IN_TABLE]
    ]
    return pa.Table.from_pylist(rows, schema=_COLUMNS)


Chosen = tuple[int, Sequence[int]]
"""A document and those that it is compared with, as rows of a batch."""


@dataclass(frozen=True, eq=False)
class Reasoner:
    """Gives reasons for the order in which bundles, or the mean of several, rank documents of some features."""

    features: Sequence[Feature]
    scorers: Sequence[Scorer]
    explainers: Sequence[Explainer]
    names: Mapping[str, Mapping[int, str]]
    """The names of categories by their codes, by feature."""

    @classmethod
    def from_bundles(
        cls,
        opened: Mapping[str, Bundle],
        features: Sequence[Feature],
        names: Mapping[str, Mapping[int, str]],
        *,
        device: torch.device | str = "cpu",
    ) -> Self:
        """A reasoner for these bundles.

        Raises:
            InputError: one cannot score, or was made for other features.
        """
        scorers = scorers_of(opened, features=features, device=device)
        explainers = [bundle.explainer(Computing(device), features) for bundle in opened.values()]
        return cls(tuple(features), [*scorers.values()], explainers, names)

    def explain_firsts(self, groups: QueryGroups, ids: pa.Table, depth: int) -> list[Explanation]:
        """Why the first document of each list stands above those of ranks 2 to `depth`; none for a list of one."""
        scores_N = torch.stack([score(groups).double() for score in self.scorers]).mean(0)
        chosen = []
        for first, last in itertools.pairwise(groups.offsets_Q1.tolist()):
            order = (first + np.argsort(-scores_N[first:last].numpy(), kind="stable"))[:depth].tolist()
            chosen += [(order[0], order[1:])] if len(order) > 1 else []
        return self.explain(groups, ids, chosen)

    def explain(self, groups: QueryGroups, ids: pa.Table, chosen: Sequence[Chosen]) -> list[Explanation]:
        """An explanation of each choice; `ids` has `query_id` and perhaps `doc_ids`, a row for each group."""
        pairs_P2 = torch.tensor([(a, b) for a, others in chosen for b in others], dtype=torch.int64).view(-1, 2)
        if not len(pairs_P2):
            return []
        parts = [explain(groups, pairs_P2) for explain in self.explainers]
        features_PF = torch.stack([each.features_PF.cpu() for each in parts]).mean(0)
        beside_P = torch.stack([each.beside_P.cpu() for each in parts]).mean(0)
        ends = np.cumsum([len(others) for _, others in chosen])[:-1].tolist()
        of_choices = zip(torch.tensor_split(features_PF, ends), torch.tensor_split(beside_P, ends), strict=True)
        return [
            self._explanation(groups, ids, choice, Contributions(f_PF.mean(0, keepdim=True), b_P.mean(0, keepdim=True)))
            for choice, (f_PF, b_P) in zip(chosen, of_choices, strict=True)
        ]

    def _explanation(self, groups: QueryGroups, ids: pa.Table, choice: Chosen, mean: Contributions) -> Explanation:
        (row, others), adds_F = choice, mean.features_PF[0].numpy()
        group = int(np.searchsorted(groups.offsets_Q1.numpy(), row, side="right")) - 1
        least = _NEGLIGIBLE * max(np.abs(adds_F).max(initial=0.0), abs(float(mean.beside_P[0])))
        values_NF = groups.features_NF
        reasons = [
            FeaturePart(
                feature=self.features[column].name,
                value=self._shown(column, values_NF[[row], column]),
                against=self._shown(column, values_NF[list(others), column], than=float(values_NF[row, column])),
                adds=float(adds_F[column]),
            )
            for column in np.argsort(-np.abs(adds_F), kind="stable").tolist()
            if abs(adds_F[column]) > least
        ]
        if abs(beside := float(mean.beside_P[0])) > least:
            reasons.append(FeaturePart(feature=BESIDE, value="", against="", adds=beside))
            reasons.sort(key=lambda reason: -abs(reason.adds))
        start, doc_ids = int(groups.offsets_Q1[group]), None
        if "doc_ids" in ids.column_names:
            doc_ids = ids["doc_ids"][group].as_py()
        item, *against = [doc_ids[i - start] if doc_ids else f"document {i - start + 1}" for i in (row, *others)]
        return Explanation(
            query=str(ids["query_id"][group].as_py()),
            item=str(item),
            against=str(against[0]) if len(against) == 1 else None,
            others=len(others),
            difference=float(mean.total_P[0]),
            reasons=tuple(reasons),
        )

    def _shown(self, column: int, values_M: Tensor, than: float | None = None) -> str:
        """The value of a feature; for several, the median, or the most frequent category other than `than`."""
        feature, present = self.features[column], values_M[~values_M.isnan()].numpy()
        if 2 * len(present) < len(values_M) or not len(present):
            return "none"
        if feature.kind == "numeric":
            return f"{float(np.median(present)):.6g}"  # single precision needs no more digits
        counts = Counter(present.tolist())
        code, count = max(counts.items(), key=lambda pair: (pair[0] != than, pair[1]))
        name = self.names.get(feature.name, {}).get(int(code), str(int(code)))
        return name if len(values_M) == 1 else f"{name} in {count} of {len(values_M)}"
