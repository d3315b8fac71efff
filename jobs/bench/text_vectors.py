"""The candidates of NFCorpus with vectors of query and document: a log whose features are mostly embeddings.

  python -m jobs.bench.text_vectors --set out=runs/nfcorpus-vectors

The vectors are latent semantic ones: the largest singular vectors of tf-idf over the documents, to which no label
contributes. A row of the log is one of bm25.tsv with `q_*`, the query's vector, `d_*`, the document's, `p_*`, their
product, and `cosine`, its sum. `jobs/configs/results/study-nfcorpus-vectors.yaml` continues from here.
"""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv
from pydantic import Field
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import normalize

from jobs.cli import Command, main
from ltrscale import storage
from ltrscale.arrays import Doubles
from ltrscale.config import Config
from ltrscale.progress import log


class TextVectorsJob(Config):
    """Add vectors of queries and documents to the candidates of a text collection."""

    out: str
    """Directory of `candidates.parquet`."""
    data: str = "../shared/data/text/nfcorpus"
    """The collection: queries, documents and candidates of BM25 as tables."""
    dimensions: int = Field(64, ge=1)
    """Size of each vector."""
    seed: int = 0
    """Of the random start of the decomposition."""

    def run(self) -> None:
        """Fit the vectors on all documents and write the log."""
        documents, queries, rows = (self._table(name) for name in ("documents", "queries", "bm25"))
        words = TfidfVectorizer(sublinear_tf=True, stop_words="english")
        texts = zip(documents["title"].to_pylist(), documents["text"].to_pylist(), strict=True)
        counts = words.fit_transform(" ".join(parts) for parts in texts)
        components = TruncatedSVD(self.dimensions, random_state=self.seed).fit(counts)

        def of_rows(table: pa.Table, key: str, vectors: Doubles) -> Doubles:
            unit: Doubles = normalize(vectors)
            place = {name: number for number, name in enumerate(table[key].to_pylist())}
            return unit[[place[name] for name in rows[key].to_pylist()]]

        query_ND = of_rows(queries, "qid", components.transform(words.transform(queries["text"].to_pylist())))
        document_ND = of_rows(documents, "docid", components.transform(counts))
        vectors = {"q": query_ND, "d": document_ND, "p": query_ND * document_ND}
        for name, values_ND in vectors.items():
            for number, values_N in enumerate(values_ND.T):
                rows = rows.append_column(f"{name}_{number:03d}", pa.array(values_N.astype(np.float32)))
        rows = rows.append_column("cosine", pa.array(vectors["p"].sum(1).astype(np.float32)))
        file, written = io.BytesIO(), storage.join(self.out, "candidates.parquet")
        pq.write_table(rows, file)
        storage.write_bytes(written, file.getvalue())
        log.info("%s: %d candidates of %d queries, %d columns", written, len(rows), len(queries), rows.num_columns)

    def _table(self, name: str) -> pa.Table:
        with storage.open_input(storage.join(self.data, f"{name}.tsv.gz")) as file:
            plain = csv.ParseOptions(delimiter="\t", quote_char=False)
            return csv.read_csv(pa.CompressedInputStream(file, "gzip"), parse_options=plain)


COMMAND = Command("text_vectors", lambda: (TextVectorsJob, TextVectorsJob.run), __doc__, package="jobs.bench")

if __name__ == "__main__":
    main(COMMAND)
