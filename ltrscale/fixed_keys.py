"""Keys that configs had before their values became constants of the code.

What was recorded earlier (a bundle, a data set, the config of a run) may still hold such a key with this value. With
any other value it is an error, which names the value.
"""

from typing import Any

FIXED: dict[str, dict[str, Any]] = {
    "BaiduUltr": {"max_query": 32, "max_title": 64, "max_abstract": 128},
    "BlendConfig": {"rounds": 25, "resamples": 20, "groups": 5000},
    "ClicksJob": {"pairs_per_link": 10, "impressions_per_pair": 20, "smoothing": 4.0},
    "DistillJob": {
        "overlap_at": [1, 5, 10],
        "parity": {"rows": 10_000, "tolerance": None},
        "speed": {"documents": 10_000, "repeats": 3},
        "docs_per_batch": 65_536,
    },
    "DoctorConfig": {"patience_s": 10},
    "GateJob": {"drift": {"documents": 1_000_000}},
    "InContextPretrainConfig": {"checkpoint_failures": 3},
    "InterleaveJob": {"power": 0.8, "docs_per_batch": 65_536},
    "NetworkStudent": {
        "seed": 0,
        "device": "auto",
        "precision": "float32",
        "compile": False,
        "deterministic": False,
        "checkpoint_minutes": 10.0,
        "checkpoint_failures": 3,
        "preflight": {"check": "footers", "max_bad": 0.0},
        "debias": None,
        "negatives": 0,
        "relevant_only": False,
        "average": 0.0,
        "validation_metric": "ndcg@5",
    },
    "PipelineJob": {"match": None},
    "PrepareConfig": {"row_group_mb": 8, "file_mb": 256},
    "ReconcileJob": {"groups_shown": 3},
    "RelabelConfig": {"compression": "zstd", "row_group_mb": 8, "file_mb": 256},
    "ReportJob": {"drift": None, "agreement_groups": 500, "explained_groups": 40, "histogram_documents": 200_000},
    "SearchConfig": {"max_failures": 1},
    "SubmitConfig": {"stop_seconds": 120},
    "TrainingConfig": {"checkpoint_failures": 3},
    "WeeklyJob": {"drift": {"documents": 1_000_000}},
}
"""The values by the config's class, or a class that it derives from, and the key; as JSON has them."""
