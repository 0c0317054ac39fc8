"""What the default suite leaves out, and what it may not; what ``LCTX_REQUIRE`` asks for."""

from itertools import combinations, product

import pytest
from cases import OP_CASES
from needs import GROUPS, lacks, need, required
from thinning import axes_of, cover

ROWS = [{"method": m, "step": s, "kv": t} for m, s, t in product("abcde", (1, 7, 64), ("f32", "q8_0"))]


def values(rows, n):
    return {some for row in rows for some in combinations(sorted(row.items()), n)}


@pytest.mark.parametrize(("strength", "n"), [(1, 5), (2, 15), (3, 30)])
def test_every_combination_is_there_in_as_few_rows_as_can_be(strength, n):
    chosen = [ROWS[i] for i in cover(ROWS, strength)]
    assert values(chosen, strength) == values(ROWS, strength)
    assert len(chosen) == n


def test_values_are_taken_equally_often():
    chosen = [ROWS[i] for i in cover(ROWS)]
    assert sorted(row["kv"] for row in chosen).count("f32") in (2, 3)
    assert {row["method"] for row in chosen} == set("abcde")


@pytest.mark.parametrize("strength", [1, 2])
def test_a_table_keeps_every_value_of_every_field(strength):
    rows = [dict(axes_of("case", case)) for case in OP_CASES]
    chosen = [rows[i] for i in cover(rows, strength)]
    assert values(chosen, strength) == values(rows, strength)
    fields = {"case.n_rows", "case.type_k", "case.method", "case.method.group_size", "case.rope.mode"}
    assert fields < set().union(*chosen)


def test_what_is_required_may_not_be_skipped(monkeypatch):
    monkeypatch.setenv("LCTX_REQUIRE", "page,train")
    assert required() == {"page", "train"}
    with pytest.raises(pytest.fail.Exception, match="train: no torch"):
        lacks("train", "no torch")
    with pytest.raises(pytest.skip.Exception, match="cuda: no nvcc"):
        lacks("cuda", "no nvcc")
    with pytest.raises(pytest.fail.Exception, match="nothing_of_this_name"):
        need("page", "json", "nothing_of_this_name")
    assert need("page", "json.decoder").JSONDecodeError


def test_all_groups_can_be_required(monkeypatch):
    monkeypatch.setenv("LCTX_REQUIRE", "all")
    assert required() == set(GROUPS)
    monkeypatch.setenv("LCTX_REQUIRE", "pages")
    with pytest.raises(pytest.UsageError, match="no group pages; there are stock, server"):
        required()
