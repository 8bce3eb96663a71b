import pytest

from dome import compression
from dome_lab.bench.questions import compressors


@pytest.fixture(scope="module")
def rows():
    return compressors.compute(compressors.SCALES["smoke"], lambda what, done: None)


def test_every_public_compressor_is_measured():
    no_compressors = {"Codec", "Compressor", "Message", "Unbiased", "sum_messages"}
    public = set(compression.__all__) - no_compressors
    assert {name.split(",")[0] for name in compressors.COMPRESSORS} == public


def test_each_has_a_row_with_its_size_and_time(rows):
    assert [row["compressor"] for row in rows] == list(compressors.COMPRESSORS)
    assert all(row["median"] > 0 and row["num_bits"] > 0 for row in rows)
    smaller = {row["compressor"]: row["reduction"] for row in rows}
    # A thousandth of the numbers, but a header too.
    assert 500 < smaller["RandomK, rate 1000"] < 1000
    assert 31 < smaller["SignSGD"] < 32


def test_the_table_has_a_line_for_each_row(rows):
    table = compressors.table(rows)
    assert len(table.rows) == len(rows)
    assert all(len(line) == len(table.headings) for line in table.rows)
