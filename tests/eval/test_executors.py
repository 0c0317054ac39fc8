"""Executors run every sample once, also when processes die, in as many processes as memory allows."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from needs import need

from pylongctx.cli import main
from pylongctx.eval import executors as local
from pylongctx.eval.executors import SAMPLES_PER_UNIT, Failed, make_executor, units_of
from pylongctx.eval.passkey import Passkey
from pylongctx.eval.runner import Cell, digest, make_samples, run

LENGTH = 160
MIB = 2**20
TIMES = ("seconds", "ttft", "prompt_per_second", "token_seconds", "peak_rss")


@dataclass(frozen=True)
class Deadly(Passkey):
    """Kills the process that runs its second sample, the first time, or always."""

    flag: str = ""
    always: bool = False
    name: str = field(default="passkey", init=False)

    def run(self, llm, vocabulary, sample):
        if sample.facts["trial"] == 1 and (self.always or not Path(self.flag).exists()):
            Path(self.flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(llm, vocabulary, sample)


@dataclass(frozen=True)
class Endless(Passkey):
    """Prints the process of a sample, which never ends."""

    name: str = field(default="passkey", init=False)

    def run(self, llm, vocabulary, sample):
        print(os.getpid(), flush=True)
        time.sleep(600)


@pytest.fixture(scope="module")
def job(embedded_model):
    return Cell(str(embedded_model), "full", Passkey(tests=3), LENGTH, options={"n_threads": 1, "n_threads_batch": 1})


@pytest.fixture(scope="module")
def samples(job):
    return make_samples(job)


@pytest.fixture(scope="module")
def expected(job, samples):
    return {record["digest"]: timeless(record) for record in run(job, samples)}


def timeless(record):
    return {key: value for key, value in record.items() if key not in TIMES}


def outcomes(executor, units):
    """Return the records by digest, none of them twice, and the failures."""
    found = [outcome for _, outcome in executor.run(units)]
    records = [outcome for outcome in found if not isinstance(outcome, Failed)]
    assert max(Counter(record["digest"] for record in records).values(), default=1) == 1
    by_digest = {record["digest"]: timeless(record) for record in records}
    return by_digest, [outcome.reason for outcome in found if isinstance(outcome, Failed)]


# ---- units ----


def test_units_hold_what_is_not_done(job):
    many = replace(job, task=Passkey(tests=2 * SAMPLES_PER_UNIT + 2))
    samples = make_samples(many)
    names = [digest(many, sample) for sample in samples]
    units = units_of(many, samples, {names[0]})
    assert [len(unit.todo) for unit in units] == [SAMPLES_PER_UNIT, SAMPLES_PER_UNIT, 1]
    assert [name for unit in units for name in unit.todo] == names[1:]
    assert units_of(many, samples, set(names)) == []


# ---- processes ----


@pytest.mark.parametrize("n_workers", [1, 2])
def test_processes_make_the_same_records(job, samples, expected, n_workers):
    units = [unit for name in expected for unit in units_of(job, samples, set(expected) - {name})]
    found, failed = outcomes(local.Local(n_workers), units)
    assert (found, failed) == (expected, [])


def test_what_a_dead_process_left_is_redone(job, tmp_path, expected):
    deadly = replace(job, task=Deadly(tests=3, flag=str(tmp_path / "died")))
    found, failed = outcomes(local.Local(), units_of(deadly, make_samples(deadly), ()))
    assert (found, failed) == (expected, [])
    assert (tmp_path / "died").exists()


def test_a_sample_that_kills_every_process_is_given_up(job, tmp_path, expected):
    deadly = replace(job, task=Deadly(tests=3, flag=str(tmp_path / "died"), always=True))
    found, failed = outcomes(local.Local(), units_of(deadly, make_samples(deadly), ()))
    assert list(found) == list(expected)[:1]
    assert failed == [f"{local.TRIES} workers died of it, the last with SIGKILL"]


def test_what_is_refused_does_not_stop_the_rest(job, samples, expected):
    refused = replace(job, options={"n_ctx": 0, "rope_scaling_type": 99})
    units = [*units_of(refused, samples, ()), *units_of(job, samples, ())]
    found, failed = outcomes(local.Local(), units)
    assert found == expected
    assert len(failed) == 1


RUNNING = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/../support", sys.argv[1] + "/../../bench"]
from test_executors import Cell, Endless, local, make_samples, units_of
cell = Cell(sys.argv[2], "full", Endless(tests=1), 160, options={"n_threads": 1, "n_threads_batch": 1})
list(local.Local().run(units_of(cell, make_samples(cell), ())))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_worker_ends_with_the_first_process(embedded_model, number):
    command = [sys.executable, "-c", RUNNING, Path(__file__).parent, embedded_model]
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE)
    worker = int(process.stdout.readline())
    process.send_signal(number)
    try:
        process.communicate(timeout=20)  # the output is open until the worker ends
    except subprocess.TimeoutExpired:
        os.kill(worker, signal.SIGKILL)
        raise
    assert process.returncode == -number


# ---- memory ----


def test_a_job_takes_what_the_preflight_says(job, samples):
    (unit,) = units_of(job, samples, ())
    need, longer = (local.memory_of(replace(unit, cell=replace(job, length=n))) for n in (LENGTH, 4096))
    (device,) = need.shared
    assert need.shared[device] == longer.shared[device] > MIB
    assert 0 < need.own[device] < longer.own[device]


@pytest.mark.parametrize(("free", "n_workers"), [(1000, 3), (75, 1), (90, 2), (10, 1)])
def test_as_many_processes_as_fit(job, samples, monkeypatch, free, n_workers):
    need = local.Need(Counter(CPU=50), Counter(CPU=20), Counter(CPU=free))
    monkeypatch.setattr(local, "memory_of", lambda unit: need)
    monkeypatch.setattr(local, "available_cpus", lambda: 7)
    units = [unit for sample in samples for unit in units_of(job, samples, {digest(job, sample)})]
    assert local.Local(None).plan(units) == (n_workers, 7 // n_workers)
    assert local.Local(1).plan(units) == (1, 7)


# ---- Dask ----


@pytest.fixture
def cluster():
    distributed = need("cluster", "distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        yield f"dask://{cluster.scheduler_address.removeprefix('tcp://')}"


def test_a_cluster_redoes_what_a_dead_worker_left(cluster, job, tmp_path, expected):
    deadly = replace(job, task=Deadly(tests=3, flag=str(tmp_path / "died")))
    samples = make_samples(deadly)
    units = [unit for name in expected for unit in units_of(deadly, samples, set(expected) - {name})]
    refused = replace(job, method="longheads,window=1024")
    units += units_of(refused, samples, ())
    found, failed = outcomes(make_executor(cluster), units)
    assert found == expected
    assert (tmp_path / "died").exists()
    assert len(failed) == 1


def test_the_command_runs_on_a_cluster(cluster, tmp_path):
    options = ["--method", "full", "--lengths", "160", "--task", "passkey,tests=2", "-t", "1"]
    assert main(["matrix", *options, "--out", str(tmp_path), "--executor", cluster]) == 0
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 2


# ---- errors ----


@pytest.mark.parametrize("name", ["slurm", "dask://", "localhost"])
def test_unknown_executors_are_refused(name):
    with pytest.raises(ValueError, match="it is local, or dask://HOST:PORT"):
        make_executor(name)


def test_no_workers_are_refused():
    with pytest.raises(ValueError, match="at least 1 worker, not 0"):
        make_executor("local", 0)


def test_a_missing_dask_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ImportError, match=r"pip install 'pylongctx\[cluster\]'"):
        make_executor("dask://localhost:8786")
