"""Check the weights of a training split: none may be negative, and zeros remove documents from training.

Shapes: N documents.
"""

from collections import Counter
from dataclasses import replace

from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.progress import log

_MOST_LABELS = 64
"""With more distinct labels, they are not grades, and it means nothing if all documents of a label have weight 0."""
_REMEDY = (
    "such a document has no part in training; if the weight is what a document is worth, such as its revenue, map it "
    "as columns.gain in prepare, not columns.weights, and measure it by evaluate.gains: column"
)


_warnings: dict[tuple[str, int], str] = {}
"""Warnings by hash and number of groups, so that data are read and a warning logged once per process."""


def check_weights(selection: Selection) -> str:
    """Warn where weights are 0 for most documents, or for all documents of one label; returns the warning, or "".

    It reads only the labels and weights of the labelled groups that are served. Call it before a training that
    multiplies by weights. Scores that serve as labels are not grades, and are not checked.

    Raises:
        InputError: all weights are 0, or one is negative or infinite, in a data set that prepare did not check.
    """
    key = selection.hash, selection.n_groups
    if key not in _warnings:
        _warnings[key] = "" if selection.reads_scores else _look(selection)
        if _warnings[key]:
            log.warning("weights: %s; %s", _warnings[key], _REMEDY)
    return _warnings[key]


def _look(selection: Selection) -> str:
    documents, zeros = Counter[float](), Counter[float]()
    for groups in iterate(replace(selection, features=(), tokens=()), docs_per_batch=1 << 16):
        if groups.weights_N is None:
            return ""
        assert groups.labels_N is not None
        documents.update(groups.labels_N.tolist())
        zeros.update(groups.labels_N[groups.weights_N == 0].tolist())
        if bool((bad_N := (groups.weights_N < 0) | groups.weights_N.isinf()).any()):
            value = groups.weights_N[bad_N][0].item()
            raise InputError(f"train: a document has weight {value:g}; prepare the data again, which rejects such rows")
    if zeros.total() == documents.total():
        raise InputError(
            f"train: all {zeros.total():,} documents have weight 0, so there is nothing to learn; {_REMEDY}"
        )
    return _wrong(documents, zeros)


def _wrong(documents: Counter[float], zeros: Counter[float]) -> str:
    """What is wrong with weights, from the documents and zero-weight documents of each label; "" if nothing is."""
    whole = [label for label in sorted(zeros) if zeros[label] == documents[label]]
    total, without = documents.total(), zeros.total()
    if 2 * without <= total and (not whole or len(documents) > _MOST_LABELS):
        return ""
    text = f"{without:,} of {total:,} documents ({without / total:.1%}) have weight 0"
    if not whole or len(documents) > _MOST_LABELS:
        return text
    return f"{text}, among them " + " and ".join(f"all {zeros[label]:,} of label {label:g}" for label in whole)
