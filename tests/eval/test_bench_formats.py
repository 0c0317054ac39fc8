"""What ``pylongctx bench`` takes and prints: tests, records, formats."""

import csv
import io
import json
import re
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from needs import lacks

from pylongctx.eval.bench import record
from pylongctx.eval.bench.record import Case, cases, label, pair, wanted

UPSTREAM = sorted(
    (Path(__file__).parents[2] / "build").glob("*/upstream/*/llama.cpp/tools/llama-bench/llama-bench.cpp")
)
OURS = ["method", "kv_bytes", "peak_rss", "ttft_ns", "error"]


# ---- tests ----


def test_pairs():
    assert pair("512,128") == (512, 128)
    with pytest.raises(ValueError, match="not a pair"):
        pair("512")


def test_names_of_tests():
    assert [label(512, 0, 0), label(0, 128, 16384), label(512, 128, 1)] == [
        "pp512",
        "tg128 @ d16384",
        "pp512+tg128 @ d1",
    ]


def test_cases_come_in_the_order_of_llama_bench():
    chosen = wanted([0, 8], [4], [(8, 4), (0, 0)])
    assert chosen == [(8, 0), (0, 4), (8, 4)]
    made = cases(chosen, model_filename=["a", "b"], n_depth=[0, 16])
    assert [(case.model_filename, case.name) for case in made[:4]] == [
        ("a", "pp8"),
        ("a", "tg4"),
        ("a", "pp8+tg4"),
        ("a", "pp8 @ d16"),
    ]
    assert len(made) == 12


# ---- records and formats ----


def test_fields_are_those_of_llama_bench_and_then_ours():
    if not UPSTREAM:
        lacks("build", "no build has unpacked the upstream package (build/*/upstream)")
    source = UPSTREAM[0].read_text()
    names, kinds = (
        re.search(rf"{name}\(.*?\n    }}", source, re.DOTALL)[0] for name in ("get_fields", "get_field_type")
    )
    upstream = re.findall(r'"(\w+)"', names)
    assert list(record.FIELDS) == upstream + OURS
    words = {"INT": int, "BOOL": bool, "FLOAT": float}
    kind = {name: word for part, word in re.findall(r"if \((.*?)return (\w+);", kinds, re.DOTALL)
            for name in re.findall(r'"(\w+)"', part)}  # fmt: skip
    assert [record.FIELDS[name] for name in upstream] == [words.get(kind.get(name), str) for name in upstream]


@pytest.fixture(scope="module")
def records(embedded_model) -> list[record.Record]:
    """One measured, one refused, with every character that a format may stumble over."""
    case = Case(str(embedded_model), 8, 0, n_threads=1)
    facts = {"model_type": "llama ?B Q8_0", "model_size": 5 * 2**20, "model_n_params": 4458752, "method": "full,a=1"}
    measured = record.new_record(case, "full", facts | {"kv_bytes": 2**18, "peak_rss": 3 * 2**30, "ttft_ns": 1500000})
    refused = record.new_record(case, "full", {}, 'it\'s | "quoted", not\nmeasured')
    return [record.with_samples(measured, [1000, 3000]), refused]


def printed(name: str, records: list[record.Record], columns: tuple[str, ...] = ()) -> str:
    out = io.StringIO()
    printer = record.FORMATS[name](out, columns)
    printer.start()
    for one in records:
        printer.add(one)
    printer.stop()
    return out.getvalue()


def test_samples_give_what_llama_bench_computes(records):
    measured = records[0]
    assert (measured["avg_ns"], measured["stddev_ns"]) == (2000, 1414)
    assert measured["samples_ts"] == [8e6, 8e9 / 3000]
    assert measured["avg_ts"] == pytest.approx(np.mean(measured["samples_ts"]))
    assert measured["stddev_ts"] == pytest.approx(np.std(measured["samples_ts"], ddof=1))


@pytest.mark.parametrize("name", ["json", "jsonl"])
def test_json_parses_back(name, records):
    text = printed(name, records)
    back = json.loads(text) if name == "json" else [json.loads(line) for line in text.splitlines()]
    assert [list(one) for one in back] == [[*record.FIELDS, "samples_ns", "samples_ts"], list(record.FIELDS)]
    assert all(one.items() <= whole.items() for one, whole in zip(back, records, strict=True))
    for field, kind in record.FIELDS.items():
        assert type(back[0][field]) is kind


def test_no_records_are_an_empty_list():
    assert json.loads(printed("json", [])) == []


def test_csv_parses_back(records):
    back = list(csv.DictReader(io.StringIO(printed("csv", records))))
    assert [list(one) for one in back] == [list(record.FIELDS)] * 2
    assert (back[0]["n_prompt"], back[0]["repack"], back[0]["kv_bytes"]) == ("8", "1", str(2**18))
    assert (back[1]["avg_ns"], back[1]["error"]) == ("", records[1]["error"])


def test_sql_parses_back(records):
    db = sqlite3.connect(":memory:")
    db.executescript(printed("sql", records))
    back = db.execute("SELECT * FROM llama_bench")
    assert [column[0] for column in back.description] == list(record.FIELDS)
    for row, whole in zip(back.fetchall(), records, strict=True):
        assert list(row) == [whole[name] for name in record.FIELDS]


def test_markdown_parses_back(records):
    lines = printed("md", records, ("n_threads", "type_k")).splitlines()
    head, rule, *rows = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[:4])
    assert head[:7] == ["model", "size", "params", "backend", "threads", "type_k", "method"]
    assert head[7:] == ["test", "t/s", "KV", "peak RSS", "TTFT"]
    assert all(set(cell) <= set("-:") for cell in rule)
    measured, refused = (dict(zip(head, row, strict=True)) for row in rows)
    assert measured["t/s"] == "5333333.33 \u00b1 3771236.17"
    assert [measured[name] for name in ("size", "params", "KV", "peak RSS", "TTFT")] == [
        "5.00 MiB", "4.46 M", "256.00 KiB", "3.00 GiB", "1.5 ms"
    ]  # fmt: skip
    assert refused["t/s"] == 'refused: it\'s \\| "quoted", not measured'
    assert "full: full,a=1" in lines
    assert lines[-1].startswith("build: pylongctx ")
