"""The program that compares ways to hold schemas, on a suite of three groups."""

import json
import sys

import structured
from schemas import object_of

from pylongctx.models import embedded_model


def group(name, schema, *tests):
    return {"description": name, "schema": schema, "tests": [{"data": data, "valid": valid} for data, valid in tests]}


SUITE = [
    group("bounds", {"type": "number", "minimum": 2.5, "maximum": 3}, (2.75, True), (2, False), ("a", False)),
    group("order", object_of({"a": {}, "b": {}}), ({"b": 1, "a": 2}, True), ({"a": 1}, False)),
    group("unique", {"uniqueItems": True}, ([1, 2], True), ([1, 1], False)),
]


def test_every_group_has_a_verdict(tmp_path, monkeypatch, capsys):
    (tmp_path / "suite.json").write_text(json.dumps(SUITE))
    arguments = ["--suite", str(tmp_path), "--model", str(embedded_model()), "--ways", "pylongctx,llama.cpp"]
    monkeypatch.setattr(sys, "argv", ["structured.py", *arguments, "--show", "other"])
    structured.main()
    said = capsys.readouterr().out
    assert "pylongctx: 1 held, 1 narrower, 1 refused, 0 other; " in said
    assert "llama.cpp: 0 held, 1 narrower, 0 refused, 2 other; " in said
    assert "llama.cpp: other: suite: bounds" in said
