import math
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltrscale.arrays import N_CODES
from ltrscale.ingest.categories import CategoryEncoder, encode


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.uint64(), pa.float32(), pa.float64(), pa.string()])
def test_small_integers_are_their_own_code_in_every_type(kind: pa.DataType) -> None:
    values = [0, 1, 255, N_CODES - 1]
    column = pa.array(values).cast(pa.string()).cast(kind) if kind == pa.string() else pa.array(values).cast(kind)
    assert encode(column).tolist() == values
    assert encode(column.dictionary_encode()).tolist() == values


def test_other_values_are_hashed_below_the_number_of_codes_and_do_not_depend_on_the_type() -> None:
    texts = ["-1", str(N_CODES), str(2**40), "1", "01", "1.00", "1.5", " 1", "berlin", "", "٣"]
    codes = encode(pa.array(texts))
    assert codes.dtype == np.float32
    assert ((codes >= 0) & (codes < N_CODES) & (codes == np.floor(codes))).all()
    assert codes[3] == 1
    assert len(set(codes.tolist())) == len(texts)
    assert encode(pa.array([-1, N_CODES, 2**40])).tolist() == codes[:3].tolist()
    assert encode(pa.array([-1.0, float(N_CODES), 2.0**40])).tolist() == codes[:3].tolist()
    assert encode(pa.array([2**64 - 1], pa.uint64())) == encode(pa.array([str(2**64 - 1)]))


@pytest.mark.parametrize("value", [3, 0, -1, N_CODES - 1, N_CODES, 2**40, -(2**40), 9_999_999_999_999_998])
def test_a_whole_number_that_csv_writes_as_a_float_is_that_of_parquet(value: int) -> None:
    """As pandas writes a column of integers that has a null."""
    codes = {
        float(encode(column)[0]) for column in (pa.array([value]), pa.array([float(value)]), pa.array([str(value)]))
    }
    assert encode(pa.array([str(float(value))])).tolist() == [*codes]
    assert encode(pa.array(["-0.0"])).tolist() == encode(pa.array([-0.0])).tolist() == [0.0]


def test_other_texts_that_end_in_a_zero_are_text() -> None:
    texts = ["1.0", "01.0", "1.00", "+1.0", "1.0 ", ".0", "1.0.0", "v1.0", "-.0", "9" * 17 + ".0", "٣.0"]
    encoder = CategoryEncoder()
    codes = encoder.encode(pa.array(texts)).tolist()
    assert codes[0] == 1
    assert len({*codes}) == len(texts)
    assert encoder.texts is not None
    assert [*encoder.texts] == texts[1:]


def test_codes_are_the_same_in_every_version() -> None:
    assert encode(pa.array(["berlin", "-1", "2.5"])).tolist() == [6113811.0, 6998243.0, 13952860.0]


def test_missing_values_are_nan() -> None:
    columns = [
        pa.array(["a", None]),
        pa.array([1, None]),
        pa.array([1.5, math.nan]),
        pa.array([True, None]),
        pa.array(["a", None]).dictionary_encode(),
        pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None])),
        pa.nulls(2),
    ]
    for column in columns:
        assert np.isnan(encode(column)).tolist() == [pa.types.is_null(column.type), True], column.type


def test_an_empty_column_and_a_slice() -> None:
    assert encode(pa.array([], pa.string())).tolist() == []
    assert encode(pa.array(["x", "7", "8"]).slice(1)).tolist() == [7, 8]
    assert encode(pa.array(["x", "7", "8"]).dictionary_encode().slice(1)).tolist() == [7, 8]


@given(
    st.lists(st.one_of(st.none(), st.text(max_size=3), st.integers(0, 30).map(str)), max_size=30), st.integers(0, 30)
)
def test_a_code_does_not_depend_on_the_rest_of_the_data(values: list[str | None], at: int) -> None:
    whole = encode(pa.array(values, pa.string()))
    parts = [encode(pa.array(part, pa.string())) for part in (values[:at], values[at:])]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


@pytest.mark.slow
def test_collisions_are_pairs_of_different_values_with_one_code_however_the_data_is_cut() -> None:
    rng = np.random.default_rng(0)
    values = [f"user-{i}" for i in rng.integers(0, 30_000, 60_000)]
    codes = encode(pa.array(sorted(set(values))))
    _, members = np.unique(codes, return_counts=True)
    expected = int((members * (members - 1) // 2).sum())
    assert expected > 5  # about n^2 / 2^25
    for cuts in ([0, 60_000], [0, 1, 7, 20_000, 60_000]):
        encoder = CategoryEncoder()
        for start, stop in pairwise(cuts):
            block = pa.array(values[start:stop])
            np.testing.assert_array_equal(encoder.encode(block), encode(block))
        assert encoder.collisions == expected


def test_integers_collide_with_hashed_values_only() -> None:
    encoder = CategoryEncoder()
    encoder.encode(pa.array(range(100_000)))
    assert encoder.collisions == 0
    code = int(encode(pa.array(["berlin"]))[0])
    encoder.encode(pa.array(["berlin", str(code), "berlin"]))
    assert encoder.collisions == 1


def test_encoders_of_parts_add_up_to_that_of_the_whole() -> None:
    values = [f"user-{i}" for i in np.random.default_rng(0).integers(0, 30_000, 60_000)]
    whole, sum_of_parts = CategoryEncoder(), CategoryEncoder()
    whole.encode(pa.array(values))
    for start, stop in pairwise([0, 20_000, 20_000, 41_000, 60_000]):
        part = CategoryEncoder()
        part.encode(pa.array(values[start:stop], pa.string()))
        sum_of_parts.note(part.known)
    assert sum_of_parts.collisions == whole.collisions > 5
    np.testing.assert_array_equal(sum_of_parts.known, whole.known)


def test_the_texts_of_hashed_values_are_recorded_with_their_codes_unless_they_are_too_many() -> None:
    encoder = CategoryEncoder()
    encoder.encode(pa.array(["berlin", "7", None, "paris", "berlin"]))
    encoder.encode(pa.array(["rome", "paris"]).dictionary_encode())
    encoder.encode(pa.array([-1, 3, None]))
    texts = ["berlin", "paris", "rome", "-1"]
    assert encoder.texts == dict(zip(texts, encode(pa.array(texts)).astype(int).tolist(), strict=True))
    for block in (range(4093), range(4093, 5000)):
        encoder.encode(pa.array([f"city {i}" for i in block]))
        assert encoder.texts is None
    encoder.encode(pa.array(["berlin"]))
    assert encoder.texts is None
