"""The card that explains to people how to use an export."""

from ltrscale.serving.features import ExportedFeatures
from ltrscale.serving.format import Format


def export_card(
    to: Format, features: ExportedFeatures, documents: int, difference: float, *, rows: bool = False
) -> str:
    """The card's text.

    Args:
        to: the format.
        features: columns of the export.
        documents: number of documents whose scores were compared.
        difference: the largest difference that was found.
        rows: whether the export has the transformer of raw rows.
    """
    return f"""# {to.title}

The model scores documents; higher is better.

{to.use}

{to.inputs(features)}
{to.of_rows if rows else ""}
Before this was published, the scores of a reader that has these files only were compared with the ranker's own on
{documents:,} documents: they were at most {difference:.3g} apart (`parity.json`).
"""
