"""The first pipeline of a log: a pipeline.yaml that runs as it is written, with what each choice means as comments."""

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

import yaml

from ltrscale import storage
from ltrscale.data.times import Period

_ENGINE_SCORES = (
    re.compile(r"(?i)(.*[^a-z0-9])?bm25([^a-z0-9].*)?"),
    re.compile(r"(?i)_?((es|elasticsearch|opensearch|solr|lucene|vespa|engine|search|retrieval|text)_)?score"),
)
"""Names of features that are a search engine's own score, the surer ones first."""


class Plan(NamedTuple):
    """The unit of periods, the periods with labels, and the format of times."""

    unit: Period
    names: tuple[str, ...]
    formats: tuple[str, ...]


def engine_score(features: Sequence[str]) -> str | None:
    """The feature that is a search engine's score of a document's whole text; None if none is named so.

    Example:
        >>> engine_score(["price", "bm25_title", "bm25", "score"])
        'bm25'
    """
    for pattern in _ENGINE_SCORES:
        if named := [name for name in features if pattern.fullmatch(name)]:
            return min(named, key=len)  # that of one field has the field's name, too
    return None


def pipeline_text(out: str, plan: Plan, score: str | None) -> str:
    """The methods on the data set, and a search engine's score: the last periods test, those before validate."""
    held_out = max(1, len(plan.names) // 6)
    train, rest = plan.names[: -2 * held_out], plan.names[-2 * held_out :]
    validation, test = rest[:held_out], rest[held_out:]
    return _PIPELINE.format(
        out=plain(storage.join(out, "models")),
        data=plain(storage.join(out, "data")),
        train=_range(train),
        validation=_range(validation),
        test=_range(test),
        unit=plan.unit,
        engine="" if score is None else _ENGINE.format(score=plain(score)),
        baseline="trees" if score is None else "engine",
    )


def plain(value: str) -> str:
    """A name or path as YAML, quoted where it must be."""
    unquoted = re.fullmatch(r"[A-Za-z_./][\w./-]*", value) and yaml.safe_load(value) == value
    return value if unquoted else json.dumps(value, ensure_ascii=False)


def _range(names: Sequence[str]) -> str:
    """Periods as a range of `splits`, or the one that there is; quoted where YAML would read a date."""
    text = "..".join(dict.fromkeys([names[0], names[-1]]))
    return text if yaml.safe_load(text) == text else json.dumps(text)


_ENGINE = """\
  engine: # the order of the search engine's score, which learns nothing: hard to beat by few labels, see docs/text.md
    kind: feature
    feature: {score}
  stack: # trees over that score and those of trees and scratch: the score of a document may only rise with each
    kind: stack
    members: [trees, scratch]
    stack:
      features: [{score}]
      gbdt: {{num_trees: 400, learning_rate: 0.05, num_leaves: 8, monotone: {{{score}: 1, "score of *": 1}}}}
"""

_PIPELINE = """\
# Made by jobs.init: trees, a network, and the same network pretrained without labels, compared on the last periods. The
# networks' settings are the best of a study with 30 to 3,000 labelled lists: docs/results/study-news.md of ltrscale.
out: {out}
data: {data} # jobs.prepare makes it

splits: # by {unit}: a ranker in production never sees the future
  train: {{periods: {train}}}
  validation: {{periods: {validation}}}
  test: {{periods: {test}}}
  gap: 0 # periods to leave out before validation, if labels take time to settle

seeds: [0] # five or more tell a difference from luck
pretrain_once: true # for all seeds: it reads no labels

methods:
  trees: # a search over their settings makes them harder to beat: kind tuned, in docs/guide.md
    kind: gbdt
    gbdt: {{relevant_only: true, num_trees: 400, learning_rate: 0.05, num_leaves: 31, early_stopping_rounds: 40}}
  scratch: # the difference between it and pretrained is what pretraining gives
    kind: neural
    finetune: &finetune
      loss: {{kind: softmax}}
      relevant_only: true # lists without a relevant document teach this loss nothing, as they teach lambdarank nothing
      network: &network
        transform: {{numeric: log1p_standard}} # sign(x) log(1 + |x|), then standardised: for prices and counts alike
        encoder: {{kind: resnet, width: 128, blocks: 3}}
      head: {{layers: 1}}
      head_epochs: 0
      epochs: 60
      patience: 15 # epochs without a better validation NDCG@5
      noise: 0.3 # on the inputs in training, in standard deviations
      stream: {{docs_per_batch: 256}} # many small steps from few labels; 4096 saves time where there are a million
      optimizer: {{kind: adam, learning_rate: 3.0e-4}}
{engine}  pretrained:
    kind: neural
    pretrain:
      method: {{kind: simclr_rank, temperature: 0.1}} # finds a document's other view among all views of its list
      augment: {{kind: swap_in_group, probability: 0.6}} # 60% of a view's values are of other documents of the list
      network: *network
      epochs: 16 # passes over all lists; fewer where there are many millions of documents
      stream: {{docs_per_batch: 4096}} # 1024 for a log of less than some 100,000 documents: it needs the steps
      optimizer: {{kind: adam, learning_rate: 1.0e-3}}
      # precision: bf16 # twice as fast on GPUs and CPUs that compute in bfloat16, far slower on other CPUs
    finetune: # the encoder learns at a tenth of the rate, so that few labels undo little of what it knows
      <<: *finetune
      rates: {{encoder: 0.1}}
      optimizer: {{kind: adam, learning_rate: 1.0e-3}}

evaluate:
  baseline: {baseline}

# Final models, in {out}/final/NAME: trained once more, on the validation groups too, or with test: true on all.
# Remove the # once the report has shown which method to take.
# refit: {{methods: [trees], test: false}}
"""
