"""``tests/gpu/acceptance.py`` where there is no GPU: the CPU stands for it, or runs the CUDA kernels."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import thinning
from cases import OP_CASES, OpCase
from cases_chunks import CHUNK_CASES
from cases_evict import EVICT_CASES
from gpu import acceptance as gpu
from gpu import checks as gpu_checks
from gpu import features as gpu_features
from gpu import speed as gpu_speed
from gpu.checks import Check, Text
from gpu.summary import summary
from gpu.workers import Lost, in_processes
from native_ops import Shape
from needs import lacks
from op import flash_run, make_inputs, roofline_run, run_chunks, run_evict, run_native, run_step

from pylongctx._lib import build_info
from pylongctx.models import embedded_model

SMALL = Shape(4, 2, 64)
METHODS = ("full", "longheads,chunk_size=16,window=64", "corm,window=16,recent=16,evict_every=16")


# ---- runs of single ops on a device ----


def case(**settings) -> OpCase:
    return replace(OpCase("device", n_rows=130, n_tokens=3, lse=False), **settings)


def test_a_device_is_asked_by_its_name():
    x = make_inputs(case())
    want, _ = run_native(case(), x)
    for name in ("CPU", "cpu"):
        got, _ = run_native(case(), x, device=name)
        np.testing.assert_array_equal(got, want)


def test_a_device_that_is_not_there_is_refused_with_the_names_of_the_others():
    for run in (run_native, flash_run):
        with pytest.raises(ValueError, match=r"no device 'XPU7', but: .*CPU"):
            run(case(), make_inputs(case()), device="XPU7")


def test_layers_that_are_timed_together_give_what_one_gives():
    x = make_inputs(case())
    want, one = flash_run(case(), x, n_repeat=2)
    got, times = flash_run(case(), x, n_repeat=2, n_layer=3)
    np.testing.assert_array_equal(got, want)
    assert (times > 0).all()
    assert (one > 0).all()
    step_case = replace(CHUNK_CASES[0], n_rows=200, n_tokens=200)
    rows = make_inputs(step_case)
    spec = "longheads,chunk_size=16,window=64+corm,window=16,recent=16,evict_every=16"
    one, three = (run_step(step_case, rows, spec, 8, n_repeat=2, n_layer=n) for n in (1, 3))
    np.testing.assert_array_equal(three.out, one.out)
    assert three.attend_bytes == one.attend_bytes
    assert {op for op, us in three.times.items() if (us > 0).all()} == {op for op, us in one.times.items() if us.all()}


@pytest.mark.parametrize(("run", "settings"), [(run_native, {"n_layer": 2}), (run_native, {"n_layer": -1}),
                                               (run_chunks, {"n_layer": 2}), (flash_run, {"n_layer": -1})])  # fmt: skip
def test_layers_that_cannot_be_are_refused(run, settings):
    one = CHUNK_CASES[0] if run is run_chunks else case()
    with pytest.raises(ValueError, match="n_layer"):
        run(one, make_inputs(one), **settings)


def test_caches_are_made_cold_on_the_cpu_only():
    with pytest.raises(ValueError, match="cold is for the CPU"):
        run_native(case(), make_inputs(case()), device="CPU", cold=1)


def test_copies_of_a_device_are_measured():
    limits = roofline_run(1, "CPU")
    assert limits.copy_bandwidth > 0
    assert limits.read_bandwidth == limits.gemm_f32 == limits.gemm_bf16 == 0


# ---- checks ----


def test_the_cpu_is_right_in_every_group():
    checks = list(gpu_checks.check_ops("CPU", seed=1, every=40))
    assert {check.name.rsplit(" ", 1)[0] for check in checks} == {name for name, *_ in gpu_checks.GROUPS}
    assert [check for check in checks if check.failures or check.error > 0] == []
    assert sum(check.n for check in checks) >= len([*OP_CASES, *CHUNK_CASES, *EVICT_CASES]) // 40


@pytest.mark.parametrize("group", range(3))
def test_a_device_that_computes_something_else_is_found_out(monkeypatch, group):
    """Every run on the device gets inputs of its own."""
    for name, run in (("run_native", run_native), ("run_chunks", run_chunks), ("run_evict", run_evict)):
        monkeypatch.setattr(gpu_checks, name, with_other_values(run))
    checks = list(gpu_checks.check_ops("CPU", 1, every=60, groups=gpu_checks.GROUPS[group : group + 1]))
    assert checks
    assert all(check.failures and check.error > 1 for check in checks)


def with_other_values(run):
    def other(case, x, **override):
        return run(case, replace(x, v=x.v + 1) if override else x, **override)

    return other


def test_what_a_device_refuses_is_a_failure_unless_it_is_not_made_for_it(monkeypatch):
    def refuse(*_, **override):
        raise ValueError("CUDA0 cannot run LCTX with these shapes and types")

    monkeypatch.setattr(gpu_checks, "run_native", refuse)
    wide = gpu_checks.check_case("CPU", gpu_checks.check_attend, case())
    odd = gpu_checks.check_case("CPU", gpu_checks.check_attend, case(head_dim_k=20))
    assert (wide.refused, odd.refused) == (1, 1)
    assert "cannot run" in wide.failures[0]
    assert odd.failures == []


@pytest.mark.parametrize(("got", "want", "error"), [
    ([1, 2], [1, 2], 0), ([1, 3], [1, 2], 0.5), ([0, 0], [0, 0], 0), ([-np.inf, 2], [-np.inf, 2], 0),
    ([np.nan, 2], [1, 2], np.inf), ([1, -np.inf], [1, 2], np.inf), ([1, 2], [-np.inf, 2], np.inf),
])  # fmt: skip
def test_errors_are_fractions_of_the_largest_value(got, want, error):
    assert gpu_checks.error_of(np.array(got, float), np.array(want, float)) == error


def test_a_limit_is_held_and_nan_is_beyond_every_limit():
    check = Check("x")
    check.hold("below", 0.5, 1.0)
    assert (check.error, check.failures) == (0.5, [])
    check.hold("above", 2.0, 1.0)
    check.hold("nan", np.nan, 1.0)
    assert [text.split(":")[0] for text in check.failures] == ["above", "nan"]
    assert check.error == np.inf


def test_what_has_no_kernels_with_vulkan_is_not_run():
    methods = [method for method in gpu_checks.METHODS if gpu_checks.serves("Vulkan0", method)]
    assert methods[0] == "full"
    assert [method for method in methods if "representation" in method] == [
        "longheads,chunk_size=16,window=128,representation=keys1"
    ]
    assert not {"+", "corm", "kvzip"} & {part for method in methods for part in (method.partition(",")[0], *method)}
    assert all(gpu_checks.serves("CUDA0", method) for method in gpu_checks.METHODS)
    served = [[gpu_checks.serves_case("Vulkan1", case) for case in cases] for _, cases, _ in gpu_checks.GROUPS]
    assert all(served[0])
    assert any(served[1])
    assert not all(served[1])
    assert not any(served[2])
    refused = gpu_checks.check_case("Vulkan1", gpu_checks.check_evict, EVICT_CASES[0])
    assert (refused.refused, refused.failures) == (1, [])
    assert not gpu_features.has("Vulkan0", "state", "kvzip")
    assert gpu_features.has("Vulkan0", "types", "q8_0")


# ---- processes ----


def fail_somehow(item: str) -> str:
    if item == "abort":
        os.abort()
    if item == "hang":
        time.sleep(60)
    if item == "raise":
        raise ValueError(item)
    return item.upper()


def test_an_item_that_aborts_or_hangs_is_lost_alone():
    results = list(in_processes(2, fail_somehow, ["a", "abort", "b", "hang", "c"], seconds=8))
    assert results == ["A", Lost("the process ended with status -6"), "B", Lost("no result after 8 s"), "C"]


def test_an_exception_of_an_item_is_raised_here():
    with pytest.raises(ValueError, match=r"^raise$"):
        list(in_processes(1, fail_somehow, ["a", "raise"]))


def test_a_lost_case_is_a_failure_and_the_others_are_checked():
    def lose_the_first(run, cases):
        return [Lost("the process ended with status -6"), *map(run, cases[1:])]

    group = ("store, attend", OP_CASES[:3], gpu_checks.check_attend)
    (check,) = gpu_checks.check_ops("CPU", 1, groups=[group], each=lose_the_first)
    assert (check.n, check.error) == (3, np.inf)
    assert check.failures == [f"{OP_CASES[0].name}: the process ended with status -6"]


# ---- models ----


@pytest.fixture
def text(tokens) -> Text:
    return Text(tokens[:90], tokens[90:100])


def test_a_model_on_the_cpu_says_what_it_says(model_path, text):
    checks = list(gpu_checks.check_model("tiny", str(model_path("llama")), text, 0, METHODS))
    assert [check.name for check in checks] == [f"tiny {method}" for method in METHODS]
    assert [check for check in checks if check.failures or check.error] == []


def test_other_tokens_are_found_out(monkeypatch, text):
    cpu = np.tile([0.0, 1.0, 3.0], (100, 1))
    near, far = cpu.copy(), cpu.copy()
    near[95, 1:] = 2.1, 2.0  # within the error: a tie
    far[95] = 0.0, np.nan, 3.0
    for wrong, n_other in ((near, 0), (far, 1)):
        answers = {0: cpu, 99: wrong}
        monkeypatch.setattr(gpu_checks, "logits", lambda *args, answers=answers: answers[args[2]])
        assert len(gpu_checks.differences("", None, 99, text)[1]) == n_other


def test_a_model_continues_as_it_says(embedded_model):
    prompt = gpu.tokens_of(str(embedded_model), 40)
    assert len(prompt) == 40
    text = gpu_checks.greedy(str(embedded_model), prompt, 3)
    logits = gpu_checks.logits(str(embedded_model), "full", 0, text)
    assert logits[39:42].argmax(1).tolist() == text.rest


# ---- features ----


def test_features_are_right_on_the_cpu(text):
    model = str(embedded_model())
    features = [("state", "h2o,budget=64,recent=16,evict_every=16"), ("offload", "longheads"), ("types", "q8_0")]
    checks = [gpu_features.check_feature(model, text, 0, feature) for feature in features]
    assert [check for check in checks if check.failures or check.n != 1] == []


def test_a_feature_that_fails_is_named_and_the_others_run(monkeypatch, text):
    def fail(*_):
        raise RuntimeError("lost")

    monkeypatch.setitem(gpu_features.FEATURES, "state", (fail, ("full",)))
    monkeypatch.setattr(gpu_features, "FEATURES", {name: gpu_features.FEATURES[name] for name in ("state", "draft")})
    state, *drafts = gpu_features.check_features(str(embedded_model()), text, 0)
    assert state.failures == ["RuntimeError: lost"]
    assert [draft.failures for draft in drafts] == [[], []]


# ---- speed ----


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_every_method_is_timed_next_to_stock(phase):
    speeds = list(gpu_speed.layer_speeds("CPU", "f16", 1024, phase, 1e9, repeats=1, n_layer=2, shape=SMALL))
    assert [speed.method for speed in speeds] == list(gpu_speed.METHODS)
    for speed in speeds:
        assert min(speed.attend, speed.stock, speed.bandwidth, speed.of_copy, speed.rate) > 0
        assert speed.step > speed.attend
        assert len(gpu.speed_cells(speed)) == len(gpu.SPEEDS)


def test_fewer_layers_are_taken_where_memory_ends():
    def run(n: int):
        if n > 2:
            raise ValueError("out of memory")
        return n

    assert gpu_speed.with_layers(run, 16) == 2
    with pytest.raises(ValueError, match="another reason"):
        gpu_speed.with_layers(lambda n: (_ for _ in ()).throw(ValueError("another reason")), 16)


@pytest.mark.parametrize("method", [None, METHODS[1]])
def test_a_model_is_timed_end_to_end(model_path, method):
    end = gpu_speed.end_to_end(str(model_path("llama")), method, "f16", 100, 0, n=4)
    assert min(end.prompt, end.decode) > 0
    assert (end.kv_bytes is None) == (method is None)
    assert len(gpu.end_cells(end)) == len(gpu.ENDS)


@pytest.mark.parametrize("method", gpu.QUICK_METHODS.values())
def test_the_embedded_model_runs_what_quick_times(embedded_model, method):
    assert gpu_speed.end_to_end(str(embedded_model), method, "f16", 64, 0, n=1).decode > 0


def test_aims_are_held_against_what_was_measured():
    speed = gpu_speed.Speed("decode", "full", "f16", 32768, 10.0, 11.0, 12.0, 1e12, 0.6, 1e12, 0, 0, {})
    end = gpu_speed.EndToEnd(gpu_speed.METHODS["longheads"], "f16", 8192, 1000.0, 50.0, 0, None)
    reached = [ok for _, ok in gpu.aims([speed], [end, replace(end, depth=131072, decode=20.0)])]
    assert reached == [True, False, False]


def test_the_summary_says_what_is_right_and_how_fast():
    ops = Check("store, attend")
    for done in (Check("a", 1), Check("b", 1, refused=1), Check("c", 1, failures=["c out", "c lse"])):
        ops.add(done.name, done)
    models = [Check("tiny full", 10), Check("tiny dca", 10, failures=["other tokens"])]
    stock = gpu_speed.EndToEnd("llama.cpp", "f16", 8192, 1000.0, 50.0, None, None)
    ends = [stock, replace(stock, method="full", prompt=900.0, decode=60.0)]
    lines = list(summary("cpu", 20, {"ops": [ops], "models": models}, ends))
    assert lines[0].startswith("device: CPU, ")
    assert lines[2:] == [
        "ops: 1 right, 1 wrong, 1 not served, one case in 20",
        "models: 1 right, 1 wrong; tiny dca",
        "features: not run",
        "tokens/s, 8192 tokens, f16, llama.cpp: prompt 1000.0 (1.00 x), decode 50.0 (1.00 x)",
        "tokens/s, 8192 tokens, f16, full: prompt 900.0 (0.90 x), decode 60.0 (1.20 x)",
    ]
    assert not any(line.startswith("not served there") for line in lines)


# ---- the command ----


def test_without_a_gpu_the_command_says_how_to_get_one(capsys):
    if gpu.first_gpu():
        pytest.skip("this build has a GPU")
    assert gpu.main([]) == 2
    assert "pip install . -C cmake.define.GGML_CUDA=ON" in capsys.readouterr().err
    assert gpu.main(["--device", "XPU7"]) == 2
    assert "there is no device 'XPU7'" in capsys.readouterr().err


def test_the_command_prints_a_table_and_writes_the_numbers(capsys, tmp_path):
    numbers = tmp_path / "numbers.json"
    words = ["--device", "CPU", "--section", "ops", "--every", "150", "--json", str(numbers)]
    assert gpu.main(words) == 0
    assert "store, attend f32" in capsys.readouterr().out
    saved = json.loads(numbers.read_text())
    assert saved["device"] == "CPU"
    assert all(check["n"] > 0 and check["failures"] == [] for check in saved["checks"])


def test_the_command_fails_when_something_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(gpu_checks, "run_native", with_other_values(run_native))
    assert gpu.main(["--device", "CPU", "--section", "ops", "--every", "150"]) == 1
    assert "FAILED store, attend" in capsys.readouterr().out


def test_the_command_runs_by_itself():
    done = subprocess.run([sys.executable, gpu.__file__, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--sanitize" in done.stdout


# ---- the kernels of the GPU on the CPU ----


def test_the_kernels_of_the_gpu_are_right(monkeypatch):
    """The same checks as on a GPU, of the CUDA kernels as they are run for tests."""
    if not build_info()["emulates_cuda"]:
        lacks("harness")

    def emulated(run):
        def on_device(*args, **override):
            with monkeypatch.context() as context:
                if override:
                    context.setenv("LCTX_EMULATE_CUDA", "1")
                return run(*args, **override)

        return on_device

    for name, run in (("run_native", run_native), ("run_chunks", run_chunks), ("run_evict", run_evict)):
        monkeypatch.setattr(gpu_checks, name, emulated(run))
    checks = list(gpu_checks.check_ops("CPU", seed=2, every=25 if thinning.run_all else 100))
    assert [failure for check in checks for failure in check.failures] == []
    assert max(check.error for check in checks) > 0, "the CPU's own kernels ran"
