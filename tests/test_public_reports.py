"""What people have reported in public of other tools, and the test that says what becomes of it here.

Values and words of the tests are our own.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent

REPORTS = {
    "test_messages.py::test_lists_that_teach_no_order_are_named_before_anything_is_trained": {
        "lightgbm-org/LightGBM#387": "lists that teach nothing train a tree without a split",
        "dmlc/xgboost#6352": "a ranking objective gives every document one score",
        "unit8co/darts#1394": "CatBoost ends where all labels are equal",
    },
    "experiments/test_gains.py::test_a_negative_gain_or_weight_is_a_rejected_row_that_is_named": {
        "lightgbm-org/LightGBM#5023": "negative weights are taken",
    },
    "experiments/test_gains.py::test_a_ranker_refuses_weights_that_are_none": {
        "dmlc/xgboost#3285": "negative weights in place of none",
    },
    "ranking/test_libraries.py::test_what_was_not_retrieved_counts_as_in_a_run_without_it": {
        "opensearch-project/search-relevance#32": "documents that were not retrieved are not counted",
        "dmlc/xgboost#3050": "ties are ranked by the order of the rows",
    },
    "ingest/test_csvjson.py::test_a_first_line_that_is_a_row_is_no_header": {
        "pytorch/tutorials#1708": "a CSV file without a header loses its first row",
    },
    "ingest/test_csvjson.py::test_a_log_without_a_header_is_that_with_one": {
        "ray-project/ray#18117": "no names can be given to a CSV file without a header",
    },
    "ingest/test_roles.py::test_what_counts_the_rows_has_no_role": {
        "huggingface/datasets#5490": "the index of a data frame becomes a column of its file",
    },
    "api/test_frames.py::test_the_index_of_a_data_frame_is_left_out_with_a_word": {
        "blue-yonder/tsfresh#162": "a row's number as a feature gives the label away",
    },
    "ingest/test_types.py::test_uuids_of_a_file_are_their_text_whoever_wrote_it": {
        "apache/arrow#43807": "UUIDs of Parquet have a type of their own",
    },
    "ingest/test_types.py::test_a_column_of_any_type_is_a_feature_or_left_out": {
        "pandas-dev/pandas#34643": "a column of intervals cannot be written",
        "activeviam/atoti-notebooks#597": "a column of periods ends the reading of a frame",
    },
    "api/test_frames.py::test_columns_that_are_named_by_numbers_are_named_by_them": {
        "scikit-learn-contrib/sklearn-pandas#143": "columns that are named by numbers end the fit",
    },
    "ingest/test_csvjson.py::test_nan_of_json_is_a_missing_value_of_any_type": {
        "pandas-dev/pandas#30716": "JSON lines with NaN cannot be read",
    },
    "ingest/test_csvjson.py::test_a_line_end_within_quotes_is_said_where_it_is_met": {
        "pandas-dev/pandas#59009": "line ends within quotes of CSV",
    },
    "ingest/test_mapping.py::test_a_time_that_states_its_zone_is_that_time_in_every_zone": {
        "bxparks/bigquery-schema-generator#19": "times that end with UTC are text",
    },
    "ingest/test_letor.py::test_indices_from_zero_or_unsorted_and_a_query_at_the_end_are_read": {
        "ibayer/fastFM#66": "features out of order cannot be read",
    },
    "ingest/test_letor.py::test_what_scikit_learn_writes_is_read": {
        "scikit-learn/scikit-learn#756": "indices that count from 0",
    },
    "ingest/test_letor.py::test_a_row_that_cannot_be_read_says_why": {
        "lightgbm-org/LightGBM#2538": "a row with qid that cannot be read, without a reason",
    },
    "trees/test_gbdt.py::test_a_long_group_trains_the_libraries_without_a_limit": {
        "microsoft/lightgbm-transform#14": "a list of more than 10,000 documents",
    },
    "trees/test_gbdt.py::test_labels_of_linear_gain_go_beyond_those_of_exponential_gain_in_every_split": {
        "dmlc/xgboost#11517": "linear gains refuse labels above 31",
    },
    "trees/test_gbdt.py::test_a_leaf_has_the_second_derivatives_that_are_asked_for": {
        "lightgbm-org/LightGBM#2968": "the smallest leaf of few rows makes all scores 0",
    },
    "ranking/test_metrics.py::test_a_label_without_a_finite_gain_is_an_error_and_never_undefined": {
        "dmlc/xgboost#6707": "NDCG above 1 by gains that overflow",
    },
    "cluster/test_submission.py::test_what_is_sent_may_change_meanwhile": {
        "ray-project/ray#36703": "a directory that changes while it is sent",
    },
    "ingest/test_vectors.py::test_a_column_of_64_is_64_columns_byte_for_byte": {
        "autogluon/autogluon#3997": "an embedding has to be taken apart by hand",
    },
}
"""By test, beside its path: the reports, and what went wrong there."""


CASES = [(report, test) for test, reports in REPORTS.items() for report in reports]


@cache
def defined_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize(("report", "test"), CASES, ids=[f"{report} {i}" for i, (report, _) in enumerate(CASES)])
def test_what_was_reported_has_its_test(report: str, test: str) -> None:
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report)
    path, _, name = test.partition("::")
    assert name in defined_in(path), REPORTS[test][report]
