"""``pylongctx bench --vs``: what programs of others are asked, how their answers are read, what is refused."""

import importlib
import json
import re
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pylongctx.cli import main
from pylongctx.eval.bench import programs
from pylongctx.eval.bench.record import Case

# the fields that llama-bench of ik_llama.cpp 8337e4cd prints (get_fields, get_values), for -p 0 -n 0 -gp 48,8
IK_RECORD = {
    "build_commit": "8337e4cd3", "build_number": 4840, "cuda": False, "vulkan": False, "metal": False, "sycl": False,
    "rpc": "0", "gpu_blas": False, "blas": False, "cpu_info": "AMD EPYC", "gpu_info": "", "model_filename": "m.gguf",
    "model_type": "llama ?B Q8_0", "model_size": 4744192, "model_n_params": 4458752, "n_batch": 2048, "n_ubatch": 16,
    "n_threads": 1, "type_k": "f16", "type_v": "f16", "n_gpu_layers": 0, "split_mode": "layer", "main_gpu": 0,
    "no_kv_offload": False, "flash_attn": True, "mla_attn": 3, "attn_max_batch": 0, "ser": "-1,0", "reuse": True,
    "tensor_split": "0.00", "use_mmap": True, "embeddings": False, "repack": True, "mqkv": False, "muge": False,
    "defer_experts": False, "fused_moe": True, "grouped_er": False, "no_fused_up_gate": False, "use_thp": False,
    "no_ooae": False, "rcache": False, "sas": False, "max_gpu": 0, "cuda_params": "", "override_tensor": "",
    "n_prompt": 48, "n_gen": 8, "test_time": "2026-11-23T05:10:00Z", "avg_ns": 1000000, "stddev_ns": 0,
    "avg_ts": 8000.0, "stddev_ts": 0.0, "test": "tg8@pp48", "samples_ns": [1000000], "samples_ts": [8000.0],
}  # fmt: skip

BENCH_HELP = "  -n, --n-gen <n>\n  -gp <pp,tg>\n  -w, --warmup <0|1>\n"
SWEEP_HELP = "sweep-bench specific options:\n  --sweep-stride N\n  -wb, --warmup-batch\n"

# the words of every run go to a log that all fakes of a test share
START = """#!{python}
import json, os, pathlib, signal, sys
HELP = {help!r}
folder = pathlib.Path(__file__).parent
words = sys.argv[1:]
if words == ["--help"]:
    sys.exit(print(HELP))
with open(folder / "log", "a") as log:
    print(json.dumps([pathlib.Path(__file__).name, words]), file=log)
def after(option):
    return words[words.index(option) + 1]
"""
# takes 1 ms; the first repetition of several is a slow one, and lines come before the list
BENCH = """
pair = [int(n) for n in after("-gp").split(",")] if "-gp" in words else [int(after("-p")), int(after("-n"))]
samples = [9000000] * (int(after("-r")) - 1) + [1000000]
print("[\\n============ Repacked {30} tensors")
record = json.loads((folder / "record.json").read_text())
print(json.dumps(record | dict(zip(("n_prompt", "n_gen"), pair), samples_ns=samples)))
print("]")
"""
# 2 ms a prompt, 4 ms a generation, on stderr among other lines
SWEEP = """
ub, stride = int(after("-ub")), int(after("--sweep-stride")) if "--sweep-stride" in words else 1
print("llama_model_loader: loaded", file=sys.stderr)
for n_kv in range(0, int(after("-c")), ub * stride):
    row = dict(n_kv_max=int(after("-c")), n_batch=2048, n_ubatch=ub, flash_attn=1, n_gpu_layers=0, n_threads=1)
    row |= dict(n_threads_batch=1, pp=ub, tg=int(after("-n")), n_kv=n_kv, t_pp=0.002, speed_pp=ub / 0.002)
    row |= dict(t_tg=0.004, speed_tg=row["tg"] / 0.004)
    print(json.dumps(row), file=sys.stderr)
"""


@pytest.fixture
def fake(tmp_path):
    """Return a function that writes a program and returns its path."""

    def write(body: str, help: str, name: str = "llama-bench") -> Path:
        path = tmp_path / name
        path.write_text(START.format(python=sys.executable, help=help) + body)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        (tmp_path / "record.json").write_text(json.dumps(IK_RECORD))
        return path

    return write


def asked(path: Path) -> list[tuple[str, str]]:
    """Return the programs that ran, in order, and their words without the model."""
    lines = (path.parent / "log").read_text().splitlines()
    return [(name, " ".join(words[2:])) for name, words in map(json.loads, lines)]


def bench(capsys, *args: str) -> tuple[int, str, str]:
    status = main(["bench", "-t", "1", "-ub", "16", *args])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


SETTINGS = "-b 2048 -t 1 -ctk f16 -ctv f16 -ngl"
CASE = Case("m.gguf", 0, 8, n_depth=48, n_ubatch=16)


# ---- runs ----


def test_programs_take_turns_and_have_columns(capsys, fake):
    ik, sweep = fake(BENCH, BENCH_HELP), fake(SWEEP, SWEEP_HELP, "llama-sweep-bench")
    given = ("--vs", f"ik={ik} -rtr 1", "--vs", f"ik sweep={sweep} -khad -vhad -ctk q4_0")
    status, out, err = bench(capsys, "-p", "0", "-n", "8", "-d", "48", "-r", "2", "-o", "json", *given)
    assert status == 0, err
    ours, theirs, swept = json.loads(out)
    assert [one["method"] for one in (ours, theirs, swept)] == ["full", "ik", "ik sweep"]
    assert [(one["n_prompt"], one["n_gen"], one["n_depth"]) for one in (ours, theirs, swept)] == [(0, 8, 48)] * 3
    assert (theirs["samples_ns"], theirs["build_commit"], theirs["backends"]) == ([1000000] * 2, "8337e4cd3", "CPU")
    assert (swept["samples_ns"], swept["type_k"], swept["type_v"]) == ([4000000] * 2, "q4_0", "f16")
    runs = asked(ik)
    assert [name for name, _ in runs] == ["llama-bench", "llama-sweep-bench"] * 2
    layers = runs[0][1].partition("-ngl ")[2].split()[0]
    assert runs[0][1] == f"{SETTINGS} {layers} -rtr 1 -p 0 -n 0 -gp 48,8 -ub 16 -r 1 -o json -w 0"
    assert runs[1][1] == (
        f"-b 2048 -t 1 -ctv f16 -ngl {layers} -khad -vhad -ctk q4_0 -c 80 -ub 16 -n 8 --output-format jsonl "
        "--sweep-stride 3 -wb"
    )
    head, _, row = ([cell.strip() for cell in line.split("|")[1:-1]] for line in err.strip().splitlines())
    assert head[5:] == ["t/s", "ik t/s", "ratio to ik", "ik sweep t/s", "ratio to ik sweep"]
    assert (row[6], row[8]) == ("8000.00", "2000.00")
    ratios = [float(re.match(r"[\d.]+", row[column])[0]) for column in (7, 9)]
    assert ratios[1] == pytest.approx(4 * ratios[0], abs=0.03)


def test_a_prompt_warms_up_whole(capsys, fake):
    ik = fake(BENCH, BENCH_HELP)
    status, out, err = bench(capsys, "-p", "16", "-n", "0", "-r", "1", "-o", "json", "--vs", f"ik={ik}")
    assert status == 0, err
    assert json.loads(out)[1]["samples_ns"] == [1000000]
    assert asked(ik)[0][1].endswith("-p 16 -n 0 -ub 16 -r 2 -o json -w 0")
    bench(capsys, "-p", "16", "-n", "0", "-r", "1", "--no-warmup", "--vs", f"ik={ik}")
    assert asked(ik)[1][1].endswith("-p 16 -n 0 -ub 16 -r 1 -o json -w 0")


def test_what_llama_cpp_itself_is_asked():
    upstream = programs.LlamaBench()
    whole = Case("m.gguf", 16, 8, n_depth=48, n_ubatch=16)
    assert upstream.unable(whole) == ""
    assert upstream.options(whole, True) == "-p 0 -n 0 -pg 16,8 -d 48 -ub 16 -r 1 -o json".split()
    assert upstream.options(CASE, False) == "-p 0 -n 8 -d 48 -ub 16 -r 1 -o json --no-warmup".split()


def test_a_sweep_measures_prompts_at_depths(capsys, fake):
    sweep = fake(SWEEP, SWEEP_HELP, "llama-sweep-bench")
    status, out, err = bench(
        capsys, "-p", "16", "-n", "0", "-d", "0,32", "-r", "1", "-o", "json", "--vs", f"s={sweep}", "--no-warmup"
    )
    assert status == 0, err
    records = json.loads(out)[1::2]
    assert [(one["n_prompt"], one["n_depth"], one["samples_ns"]) for one in records] == [
        (16, 0, [2000000]),
        (16, 32, [2000000]),
    ]
    assert [words.partition("-c ")[2] for _, words in asked(sweep)] == [
        "32 -ub 16 -n 1 --output-format jsonl --no-warmup",
        "64 -ub 16 -n 1 --output-format jsonl --sweep-stride 2 --no-warmup",
    ]


def test_an_older_sweep_measures_every_depth(fake):
    found = programs.program(f"old={fake(SWEEP, 'usage: llama-sweep-bench -c N', 'llama-sweep-bench')}")
    assert found.dialect == programs.SweepBench(stride=False, warm=False)
    assert "--sweep-stride" not in found.command(CASE, True)
    assert found.measure(CASE, True)["samples_ns"] == [4000000]


def test_a_refused_test_has_no_ratio_and_others_run(capsys, fake):
    ik, sweep = fake(BENCH, BENCH_HELP), fake(SWEEP, SWEEP_HELP, "llama-sweep-bench")
    status, out, _ = bench(
        capsys, "-p", "16", "-n", "0", "-d", "16", "-r", "1", "--vs", f"ik={ik}", "--vs", f"sweep={sweep}"
    )
    assert status == 1
    assert "refused: this llama-bench has no -d, so it cannot prefill at a depth" in out
    cells = [cell.strip() for cell in out.strip().splitlines()[-1].split("|")]
    assert cells[7:9] == ["-", "-"]
    assert cells[9] == "8000.00"


# ---- refusals ----


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("m", 16, 8, n_ubatch=16), "a prompt or a generation, not both"),
        (Case("m", 24, 0, n_ubatch=16), "measures pp16 and at most tg16, at depths that 16 divides, not pp24"),
        (Case("m", 0, 17, n_ubatch=16), "not tg17"),
        (Case("m", 16, 0, n_depth=40, n_ubatch=16), "not pp16 @ d40"),
    ],
)  # fmt: skip
def test_what_a_sweep_cannot_measure(case, reason):
    assert reason in programs.SweepBench().unable(case)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("sys.exit('warning\\nerror: no such model')", "error: no such model"),
        ("sys.exit(3)", "ended with status 3"),
        ("print('| model | t/s |')", "llama-bench printed no result of llama-bench, but '| model | t/s |'"),
        ("", "llama-bench printed no result of llama-bench, but ''"),
        ("print('[{}]')", "llama-bench printed no result of llama-bench, but '[{}]'"),
        ("print('[5]')", "llama-bench printed no result of llama-bench, but '[5]'"),
        (BENCH + BENCH, "llama-bench printed the results of 2 tests instead of one"),
        (BENCH.replace("int(n)", "int(n) + 1"),
         "llama-bench measured n_prompt, n_gen = (49, 9) instead of (48, 8)"),
    ],
)  # fmt: skip
def test_failures_of_a_program_say_what_went_wrong(fake, body, reason):
    with pytest.raises(RuntimeError) as refused:
        programs.program(f"ik={fake(body, BENCH_HELP)}").measure(CASE, True)
    assert str(refused.value) == reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (SWEEP.replace("range(0, int(after", "range(16, int(after"), "no row of llama-sweep-bench for n_kv 0"),
        (SWEEP.replace('tg=int(after("-n"))', "tg=5"), "measured tg = 5 instead of 8"),
    ],
)  # fmt: skip
def test_failures_of_a_sweep_say_what_went_wrong(fake, body, reason):
    found = programs.program(f"ik={fake(body, SWEEP_HELP)}")
    with pytest.raises(RuntimeError, match=reason):
        found.measure(Case("m", 0, 8, n_ubatch=16), True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("llama-bench", "--vs 'llama-bench' is not LABEL=PATH or 'LABEL=PATH ARGUMENTS', as in --vs 'ik="),
        ("ik=", "is not LABEL=PATH"),
        ("ik='x", "No closing quotation"),
        ("ik=nowhere/llama-bench", "--vs ik: there is no program nowhere/llama-bench"),
        ("ik={bench} -p 5", "--vs ik: -p is set for all programs"),
        ("ik={other}", "other is neither llama-bench nor llama-sweep-bench: its --help names neither --n-gen nor"),
        ("ik={plain}", "plain cannot be run: Permission denied"),
        ("llama.cpp={bench}", "--vs: the label 'llama.cpp' is used twice; give each program its own name"),
    ],
)
def test_refusals_name_the_program(capsys, fake, tmp_path, given, message):
    paths = {"bench": fake(BENCH, BENCH_HELP), "other": fake("", "usage: other", "other"), "plain": tmp_path / "plain"}
    paths["plain"].write_text("no program")
    status, out, err = bench(capsys, "--vs", given.format(**paths))
    assert (status, out) == (1, "")
    assert message in err


# ---- what make tools-ik checks ----

CHECK = Path(__file__).parents[2] / "bench" / "check_ik.py"
TALKING = "print('======= HAVE_FANCY_SIMD is {said}')"


def checked(fake, body: str) -> "subprocess.CompletedProcess[str]":
    """Run the check on a program, for the commit of this repository's folder of tests."""
    words = [sys.executable, str(CHECK), str(CHECK.parent), str(fake(body, "")), "m.gguf"]
    return subprocess.run(words, capture_output=True, text=True)


def test_the_check_prints_the_banner_and_the_commit(fake):
    done = checked(fake, TALKING.format(said="defined"))
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"ik_llama\.cpp ([0-9a-f]{40}(-dirty)?|unknown .*): HAVE_FANCY_SIMD is defined\n", done.stdout)


@pytest.mark.parametrize("flags", ["avx2 avx512f avx512_vnni avx512vl avx512bw avx512dq", "avx2"])
def test_the_check_knows_what_the_cpu_has(fake, monkeypatch, capsys, flags):
    monkeypatch.syspath_prepend(str(CHECK.parent))
    check = importlib.import_module("check_ik")
    monkeypatch.setattr(check, "cpu_flags", lambda: set(flags.split()))
    program = str(fake(TALKING.format(said="NOT defined"), ""))
    if flags == "avx2":
        check.main(".", program, "m.gguf")
        assert capsys.readouterr().out.endswith(": HAVE_FANCY_SIMD is NOT defined\n")
        return
    with pytest.raises(SystemExit, match="this CPU has AVX-512 VNNI, but the build does not use it"):
        check.main(".", program, "m.gguf")


def test_the_check_needs_the_banner(fake):
    done = checked(fake, "sys.exit('no such model')")
    assert done.returncode == 1
    assert "ended with status 1 and said nothing of HAVE_FANCY_SIMD: ['no such model']" in done.stderr


def test_how_weights_are_loaded_is_said_to_llama_cpp_alone():
    """Other programs have other words for it, which follow their path."""
    none = replace(CASE, load_mode="none")
    assert "-lm" not in programs.LlamaBench().options(CASE, True)
    options = programs.LlamaBench().options(none, True)
    assert options[options.index("-lm") + 1] == "none"
    assert "-lm" not in programs.LlamaBench(depth=False).options(none, True)
