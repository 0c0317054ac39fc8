"""Reports: names of methods, and tables as the papers have them."""

import numpy as np
import pytest
from reports import ABOUT, answers, chunks, grid, record, texts

from pylongctx.eval.report.grids import abilities, choices_grid, grids
from pylongctx.eval.report.records import Evidence, in_order, label, short
from pylongctx.eval.report.records import perplexity as perplexity_of

# ---- methods on the same samples ----


def test_methods_compared_with_full_on_the_same_samples():
    right = {"full": (1, 1, 0, 1), "longheads": (1, 0, 0, 1), "corm": (1, 1), "tova": (1, 1, 0, 1)}
    costs = {"seconds": 2.0, "tokens_read": 100, "kv_bytes": 3 * 2**20}
    records = [
        record(method, 512, "quality", id=str(i), score=float(score), **costs)
        for method, scores in right.items()
        for i, score in enumerate(scores)
    ]
    head, *found = grid(records, "Methods on the same samples").rows
    rows = {row[0]: row[1:] for row in found}
    assert head == ["quality at 512 tokens"]
    assert rows["full"] == ["4", "75.0 [25.0, 100.0]", "", "", "100", "2.0", "3.00 MiB"]
    n, score, difference, ratio, *_ = rows["longheads"]
    assert (n, score.split()[0], difference, ratio) == ("4", "50.0", "-25.0 [-75.0, +0.0]", "0.67")
    assert rows["corm"][:4] == ["2", "100.0 [100.0, 100.0]", "+0.0 [+0.0, +0.0]", "1.00"]  # of the two it has
    assert rows["tova"][2:4] == ["+0.0 [+0.0, +0.0]", "1.00"]  # every answer is that of full


def test_all_tasks_and_settings_are_one_table():
    def answers_of(method, task, scores, n_bytes, **more):
        return [
            record(method, 512, task, id=str(i), score=float(score), kv_bytes=n_bytes, **more)
            for i, score in enumerate(scores)
        ]

    quarter = {"type_k": "q4_0", "type_v": "q4_0", "kv_offload": "disk"}
    records = [
        *answers_of("full", "quality", (1, 1, 0, 1), 100),
        *answers_of("full", "vt", (1, 0), 200),
        *answers_of("full", "cwe", (1, 1), 200),
        *answers_of("longheads", "quality", (0.5, 0.5, 0, 0.5), 25, **quarter),
        *answers_of("longheads", "vt", (1, 0), 100, **quarter),
        *answers_of("corm", "quality", (1, 1), 10),
    ]
    found = grid(records, "Tasks and settings")
    assert found.columns == ["Task", "full", "longheads q4_0 on disk", "corm"]
    rows = {row[0]: row[1:] for row in found.rows}
    assert rows["quality at 512, 4 samples"] == ["75.0", "37.5", "100.0"]
    assert rows["RULER at 512, 4 samples"] == ["75.0", "50.0", ""]
    # longheads: (0.375 + 0.5) of (0.75 + 0.5), of its two samples of RULER; corm: of its two samples
    share = rows["of the mean score of full"]
    assert (share[0], share[1].split()[0], share[2]) == ("", "0.70", "1.00 [1.00, 1.00]")
    assert rows["KV memory of that of full"] == ["100 %", "38 %", "10 %"]


def test_without_full_nothing_is_compared():
    records = [record(method, 512, "quality", score=1.0) for method in ("longheads", "corm")]
    assert not [found for found in grids(Evidence(records, ABOUT)) if "same samples" in found.title]


# ---- names ----


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "full"),
        ({"rope": "ntk"}, "ntk"),
        ({"asked": "longheads+corm,window=256", "rope": "dynamic"}, "longheads+corm@dynamic"),
        ({"type_k": "q8_0", "type_v": "q8_0"}, "full q8_0"),
        ({"type_k": "q8_0"}, "full q8_0/f16"),
    ],
)
def test_labels_leave_out_what_is_usual(fields, name):
    assert label(record() | fields) == name


def test_short_specs_keep_what_was_chosen():
    assert short("longheads,window=64+corm,window=256,recent=8") == "longheads,window=64+corm,recent=8"


def test_records_are_in_the_order_of_the_matrix():
    found = in_order(
        [record("window"), record("longheads"), record("full", 1), record("full", 2)], ["full", "longheads"]
    )
    assert [(r["asked"], r["length"]) for r in found] == [("full", 1), ("full", 2), ("longheads", 256), ("window", 256)]


# ---- tables ----


def test_perplexities_are_of_all_tokens_and_large_ones_are_not_shown():
    records = [
        texts(nll=np.log(4)),
        texts(nll=np.log(16)),
        texts(length=1024, nll=8),
        texts("longheads", nll=np.log(3)),
    ]
    assert perplexity_of(records[:2]) == pytest.approx(8)
    found = grid(records, "Perplexity (sliding, stride 256)")
    assert found.columns == ["Method", "256", "1024"]
    groups = [["Full attention"], ["full", "8.00", ">1e3"], ["Restricted attention"], ["longheads", "3.00", ""]]
    assert found.rows == groups


def test_retrieval_is_by_length():
    found = grid(answers() + answers(lengths=(256,), strict=0.0), "passkey")
    assert found.rows[1] == ["full", "50.0", "0.0"]
    assert found.rows[3] == ["longheads", "50.0", "100.0"]
    assert found.note == "samples per method and length: 1 to 2"


def test_pass_keys_of_more_digits_have_their_own_table():
    found = [g.title for g in grids(Evidence(answers() + answers("passkey-9-digits", strict=1.0)))]
    assert [title.partition(",")[0] for title in found[1:3]] == ["passkey", "passkey-9-digits"]
    assert not any(title.startswith("L-Eval") for title in found)


def test_ruler_has_a_mean_of_tasks():
    records = (
        answers("vt", ("full",), (256,))
        + answers("vt", ("full",), (256,))
        + answers("cwe", ("full",), (256,), score=0.0)
    )
    assert grid(records, "RULER, mean of 2 tasks").rows == [["full", "50.0"]]


def test_what_the_model_cannot_do_itself_is_said():
    weak = answers("vt", ("full",), (256,), string_match=0.25)
    far = answers("vt", ("full",), (1024,), string_match=1.0)  # beyond the trained length
    method = answers("vt", ("longheads",), (256,), string_match=1.0)
    records = [*weak, *far, *method, *answers("cwe", ("full",), (256,), string_match=0.5)]
    assert grid(records, "Full attention, ").rows == [
        ["vt", "256", "25.0", "not comparable by this task"],
        ["cwe", "256", "50.0", ""],
    ]
    remark = "the model cannot do this: full attention has 25 % right at 256 tokens"
    assert grid(records, "vt,").note.endswith(remark)
    assert remark not in grid(records, "cwe,").note
    assert [g.title.partition(", ")[0] for g in grids(Evidence(records, ABOUT)) if "RULER" in g.title] == ["RULER"]


def test_the_mean_of_ruler_without_what_the_model_cannot_do():
    records = [
        r
        for task, right in (("vt", 0.0), ("cwe", 0.5), ("fwe", 1.0))
        for r in answers(task, ("full",), (256,), string_match=right)
    ]
    assert grid(records, "RULER, mean of 3 tasks").rows == [["full", "50.0"]]
    able = grid(records, "RULER, mean of the 2 tasks that the model can do")
    assert (able.rows, able.note) == ([["full", "75.0"]], "cwe, fwe")


@pytest.mark.parametrize(
    "plain", [{"asked": "full"}, {"asked": "none"}, {"asked": "full", "rope": "ntk"}, {"type_k": "q4_0"}]
)
def test_by_itself_is_full_attention_with_an_unscaled_f16_cache(plain):
    records = [r | plain for r in answers("vt", ("full",), (256,), string_match=0.0)]
    assert abilities(Evidence(records, ABOUT)).keys() == ({"vt"} if len(plain) == 1 and "asked" in plain else set())


def test_nothing_is_said_of_a_model_whose_trained_length_is_not_known():
    assert abilities(Evidence(answers("vt", ("full",), (256,), string_match=0.0))) == {}


def test_perplexity_by_position_is_in_parts():
    points = [[10 * np.log(2 + i), 10] for i in range(20)]
    records = [texts(length=5000, curve=points), texts("longheads", length=5000, curve=points[:16])]
    found = grid(records, "Perplexity by position in texts of 5000 tokens")
    assert found.columns == ["Method", *(f"to {n}" for n in (768, 1536, 2304, 3072, 3840, 4608, 5000))]
    assert found.rows[1] == ["full", "2.88", "5.94", "8.96", "11.97", "14.98", "17.98", "20.49"]
    assert found.rows[3][-3:] == ["14.98", "17.00", ""]


def test_longbench_is_as_in_the_paper():
    records = [*answers("lcc", lengths=(256,), score=0.5), *answers("qasper", ("full",), (256,), score=0.25)]
    found = grid(records, "LongBench, 256 tokens")
    assert found.columns == ["Method", "Qspr.", "Lcc", "Avg."]
    assert found.rows[1] == ["full", "25.0", "50.0", "37.50"]
    assert found.rows[3] == ["longheads", "", "50.0", ""]


def test_multiple_choice_has_a_column_per_file():
    found = grid(answers("quality", score=1.0) + answers("coursera", score=0.0), "Other tasks, 1024")
    assert found.columns == ["Method", "quality", "coursera", "Avg."]
    assert found.rows[1] == ["full", "100.0", "0.0", "50.00"]


def test_costs_have_units():
    assert grid(answers(), "Time per token").rows[1] == ["full", "2.00", "2.00"]
    assert grid(answers(), "KV memory").rows[1] == ["full", "1.00 MiB", "1.00 MiB"]
    assert grid(answers(), "Peak memory").rows[1] == ["full", "1.00 GiB", "1.00 GiB"]


def test_chunks_that_are_read_are_a_table_for_each_length():
    records = [chunks(), chunks(top1=None, trial=1), chunks("longheads+corm", top1=None), chunks(length=512)]
    found = grid(records, "Chunks that are read, 256 tokens")
    assert found.columns == ["Method", "cover rate", "Gini", "hit rate, top 1", "hit rate, top 5"]
    assert found.rows == [
        ["first answer token"],
        ["longheads", "75 %", "0.25", "100 %", "100 %"],
        ["longheads+corm", "75 %", "0.25", "-", "100 %"],
        ["all answer tokens"],
        ["longheads", "75 %", "0.50", "100 %", "100 %"],
        ["longheads+corm", "75 %", "0.50", "-", "100 %"],
    ]
    assert len(list(grids(Evidence(records, ABOUT)))) == 2


def test_choices_name_method_and_options():
    chosen = "longheads,window=128"
    records = [record("longheads", n, method=chosen, options={"rope_freq_base": 2e6}) for n in (700, 256)]
    assert choices_grid(Evidence(records)).rows == [["longheads", chosen, "256, 700", "rope_freq_base=2e+06"]]
