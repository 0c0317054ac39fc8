"""Records of a matrix, and the report of them, for the tests of reports."""

import json

from pylongctx.eval.report.grids import grids
from pylongctx.eval.report.records import Evidence

MODEL = "tiny.gguf"
ABOUT = {"command": "pylongctx matrix m.toml --out here", "models": {MODEL: 512}, "methods": ["full", "longheads"]}


def record(asked="full", length=256, task="passkey", **fields):
    usual = {"asked": asked, "method": asked, "rope": "", "type_k": "f16", "type_v": "f16", "options": {}}
    usual |= {"seed": 0, "id": "0"}
    return usual | {"model": MODEL, "length": length, "task": task} | fields


def answers(task="passkey", methods=("full", "longheads"), lengths=(256, 1024), **fields):
    costs = {"kv_bytes": 2**20, "peak_rss": 2**30, "token_seconds": 0.002, "prompt_per_second": 900.0}
    scored = {"passkey": "strict", "vt": "string_match"}.get(task, "score")
    return [
        record(m, n, task, **({scored: float(m != "full" or n < 512)} | costs | fields))
        for m in methods
        for n in lengths
    ]


def texts(method="full", length=256, nll=1.0, **fields):
    return record(
        method, length, "perplexity", mode="sliding", stride=256, nll=10 * nll, n_scored=10, kv_bytes=2**20, **fields
    )


def chunks(method="longheads", length=256, top1=1.0, **fields):
    numbers = {"cover_rate": 0.75, "gini": 0.5, "hit_rate_top1": top1, "hit_rate_top5": 1.0}
    parts = {"first": numbers | {"gini": 0.25}, "all": numbers, "positions": [90, 91], "chunk_size": 16}
    heads = [[[0, 2], [1, 1], [4, 2], [5, 2]], [[0, 2], [2, 1], [4, 2], [5, 2]]]
    seen = {"forced": [2, 0, 0, 0, 2, 2], "reads": [heads]}
    said = {"right": True, "answer_chunks": [1, 2], "seed": 0, "trial": 0}
    return record(method, length, "chunks", **{**parts, **seen, **said, **fields})


def folder_of(path, records, about=ABOUT, failed=()):
    lines = [json.dumps(r | {"digest": str(i)}) for i, r in enumerate(records)]
    (path / "records.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (path / "about.json").write_text(json.dumps(about))
    (path / "failed.json").write_text(json.dumps(list(failed)))
    return str(path)


def grid(records, title):
    return next(found for found in grids(Evidence(records, ABOUT)) if found.title.startswith(title))
