"""Files of benchmarks: what is read, and the line and field that an error names."""

import gzip
import json

import pytest

from pylongctx.eval.files import published, read_json, read_lines, read_rows

pytestmark = pytest.mark.check

HINT = "--data is a file of a benchmark"
ROWS = [{"input": "one\u2028line", "outputs": ["a"]}, {"input": "two", "outputs": []}]
FIELDS = {"input": str, "outputs": list}


@pytest.fixture
def written(tmp_path):
    def write(name, text):
        (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return str(tmp_path / name)

    return write


LINES = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", LINES), ("a.jsonl.gz", LINES), ("a.json", json.dumps(ROWS)), ("a.json.gz", json.dumps(ROWS))],
)
def test_rows_come_from_lines_and_lists(written, name, text):
    assert read_rows(written(name, text), FIELDS, HINT) == ROWS


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", LINES + '{"input": "x"}', r"a.jsonl, line 4: there is no field 'outputs'; it has input"),
        ("a.jsonl", LINES + '{"input": 1, "outputs": []}', r"line 4: the field 'input' is a number, not a string"),
        ("a.jsonl", LINES + '{"input": null, "outputs": []}', r"line 4: the field 'input' is null, not a string"),
        ("a.jsonl", LINES + "[1]", r"line 4: it is a list, not an object with input, outputs"),
        ("a.jsonl", LINES + '{"input": "a "b""}', r"line 4, column 15, is not JSON: Expecting ',' delimiter"),
        ("a.json", '[{"input": "x", "outputs": []}, {}]', r"a.json, item 2: there is no field 'input'; it has none"),
        ("a.json", '{"input": "x"}', r"a.json holds an object, not a list of objects"),
        ("a.json", "[\n1,\n", r"a.json, line 3, column 1, is not JSON"),
    ],
)
def test_errors_name_line_and_field(written, name, text, message):
    with pytest.raises(ValueError, match=message):
        read_rows(written(name, text), FIELDS, HINT)


def test_a_file_that_is_not_compressed_is_an_error(tmp_path):
    (tmp_path / "a.jsonl.gz").write_text(LINES, encoding="utf-8")
    with pytest.raises(ValueError, match=f"a.jsonl.gz cannot be read: .*; {HINT}"):
        read_rows(tmp_path / "a.jsonl.gz", FIELDS, HINT)


def test_a_broken_line_is_left_out_with_a_warning(written, caplog):
    path = written("a.jsonl", LINES + '{"input": "a "b""}\n')
    assert read_rows(path, FIELDS, HINT, skip_broken=True) == ROWS
    assert "a.jsonl, line 4 is left out, it is not JSON" in caplog.text


@pytest.mark.parametrize("read", [read_json, read_lines, lambda path, hint: read_rows(path, FIELDS, hint)])
def test_a_file_that_is_not_there_is_an_error(read):
    with pytest.raises(ValueError, match=f"nothing.json does not exist; {HINT}"):
        read("nothing.json", HINT)


def test_a_text_has_lines(written):
    assert read_lines(written("a.txt", "1 a\n2 b\n"), HINT) == ["1 a", "2 b"]


def test_prompts_are_read_once():
    assert published("longbench")["hotpotqa"]["max_gen"] == 32
    assert published("ruler") is published("ruler")
