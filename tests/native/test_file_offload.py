"""K and V in a file: what a disk can do, and what a process that ends leaves."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from llamas import TEXT, new
from test_devices import reserved_port, worker

from pylongctx.drafts.speculative import LlamaPromptLookupDecoding
from pylongctx.errors import InvalidInput, LctxError
from pylongctx.models import embedded_model

SIZES = {"method": "longheads", "n_ctx": 4096, "n_batch": 512, "n_ubatch": 512}


@pytest.fixture
def llm(tmp_path):
    with new(embedded_model(), **SIZES, kv_offload="disk", kv_offload_mib=2, kv_offload_path=tmp_path) as llm:
        yield llm


@pytest.fixture
def tokens(llm):
    return llm.tokenize(TEXT * 150)[:3000]


@pytest.fixture
def want(tokens):
    """Return the logits of the last of 2000 tokens, without a file."""
    with new(embedded_model(), **SIZES) as plain:
        plain.eval(tokens[:2000])
        return plain.scores[-1].copy()


def files_of(process: int | str, folder: Path) -> list[Path]:
    """Return the open files of a process that lie in a folder, with a name or without."""
    every = [Path(f"/proc/{process}/fd") / number for number in os.listdir(f"/proc/{process}/fd")]
    return [one for one in every if one.is_symlink() and os.readlink(one).startswith(f"{folder}/")]


def test_the_file_has_no_name_and_ends_with_the_context(tmp_path):
    with new(embedded_model(), **SIZES, kv_offload="disk", kv_offload_path=tmp_path) as llm:
        llm.eval(llm.tokenize(TEXT)[:100])
        assert list(tmp_path.iterdir()) == []
        (file,) = files_of("self", tmp_path)
        assert file.stat().st_nlink == 0
        assert llm.offload_usage().file_bytes > 0
    assert files_of("self", tmp_path) == []


def test_blocks_come_as_the_text_grows_and_go_with_it(llm, tokens, tmp_path):
    (file,) = files_of("self", tmp_path)
    assert file.stat().st_blocks == 0
    llm.eval(tokens[:1000])
    first = file.stat().st_blocks * 512
    llm.eval(tokens[1000:3000])
    whole = file.stat().st_blocks * 512
    assert first < whole
    assert llm.offload_usage().file_bytes <= whole < file.stat().st_size
    llm.reset()
    llm.eval(tokens[:64])
    assert file.stat().st_blocks * 512 < first


def test_what_the_file_has_is_counted(llm, tokens):
    llm.eval(tokens[:1024])
    usage, row = llm.offload_usage(), llm.kv_usage().full_bytes // 1024
    assert usage.written_bytes == 1024 * row
    assert usage.read_bytes >= usage.bytes_moved > 0
    assert usage.file_bytes >= 1024 * row
    assert usage.file_seconds > 0


def test_a_killed_process_leaves_nothing(tmp_path):
    program = f"""
        from pylongctx import Llama
        llm = Llama({str(embedded_model())!r}, method="longheads", n_ctx=2048, kv_offload="disk",
                    kv_offload_path={str(tmp_path)!r}, verbose=False)
        llm.eval(llm.tokenize({TEXT!r})[:100])
        print("there", flush=True)
        while True:
            llm.reset()
            llm.eval(llm.tokenize({TEXT!r})[:300])
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"there\n"
    assert len(files_of(child.pid, tmp_path)) == 1
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def writable():
    """Return a function after which this process writes the first so many bytes of a file and no more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda n: resource.setrlimit(resource.RLIMIT_FSIZE, (n, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_what_cannot_be_written_ends_the_request(llm, tokens, want, writable, tmp_path):
    llm.eval(tokens[:1024])
    writable(llm.kv_usage().full_bytes)
    with pytest.raises(LctxError, match=f"file of K and V in {tmp_path} could not be written: File too large"):
        llm.eval(tokens[1024:2000])
    assert llm.n_tokens == 1024
    writable(resource.RLIM_INFINITY)
    llm.eval(tokens[1024:2000])
    np.testing.assert_allclose(llm.scores[-1], want, atol=1e-3)


def test_what_cannot_be_read_ends_the_request(llm, tokens, want, tmp_path):
    llm.eval(tokens[:2000])
    (file,) = files_of("self", tmp_path)
    size = file.stat().st_size
    os.truncate(file, 4096)
    with pytest.raises(LctxError, match=f"file of K and V in {tmp_path} could not be read: its length"):
        llm.eval(tokens[2000:2600])
    assert llm.n_tokens == 2000
    os.truncate(file, size)
    llm.reset()
    llm.eval(tokens[:2000])
    np.testing.assert_allclose(llm.scores[-1], want, atol=1e-3)


def test_a_full_disk_ends_the_request(tmp_path):
    """The disk has room when the context opens; then another program takes it."""
    program = f"""
        import os
        from pylongctx import Llama
        llm = Llama({str(embedded_model())!r}, method="longheads", n_ctx=2048, kv_offload="disk",
                    kv_offload_path={str(tmp_path / "disk")!r}, verbose=False)
        tokens = llm.tokenize({TEXT!r} * 100)[:1500]
        llm.eval(tokens[:64])
        other = os.open({str(tmp_path / "disk" / "other")!r}, os.O_CREAT | os.O_RDWR)
        os.posix_fallocate(other, 0, os.fstatvfs(other).f_bavail * os.fstatvfs(other).f_frsize - (128 << 10))
        try:
            llm.eval(tokens[64:])
        except RuntimeError as reason:
            print(reason)
        os.ftruncate(other, 0)
        llm.eval(tokens[llm.n_tokens:])
        print(llm.n_tokens)
    """
    (tmp_path / "disk").mkdir()
    (tmp_path / "fill.py").write_text(textwrap.dedent(program), encoding="utf-8")
    command = f"mount -t tmpfs -o size=32m none {tmp_path / 'disk'} && exec {sys.executable} {tmp_path / 'fill.py'}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, check=False)
    if "ermission denied" in done.stderr or "not permitted" in done.stderr:
        pytest.skip("only root mounts a small disk")
    reason, n_tokens = done.stdout.splitlines()
    assert "could not be enlarged: No space left on device; remove tokens, or free space there" in reason
    assert n_tokens == "1500"


def test_a_state_that_cannot_be_read_is_an_error(llm, tokens, tmp_path):
    llm.eval(tokens[:1000])
    os.truncate(files_of("self", tmp_path)[0], 0)
    with pytest.raises(RuntimeError, match="could not be read"):
        llm.save_state()


def test_a_disk_that_is_too_small_is_refused():
    with pytest.raises(InvalidInput, match=r"\d+ MiB are needed for n_ctx tokens and \d+ MiB are free"):
        new(embedded_model(), **SIZES | {"n_ctx": 1 << 29}, kv_offload="disk", kv_offload_mib=64, preflight=False)


@pytest.mark.parametrize(
    ("folder", "reason"), [("missing", "No such file or directory"), ("file", "Not a directory"), ("sys", "")]
)
def test_a_folder_that_cannot_have_a_file_is_refused(tmp_path, folder, reason):
    (tmp_path / "file").touch()
    path = "/proc" if folder == "sys" else tmp_path / folder
    with pytest.raises(InvalidInput, match=f"cannot keep K and V in {path}: .*{reason}; give another folder"):
        new(embedded_model(), **SIZES, kv_offload="disk", kv_offload_path=path)


def test_weights_may_be_on_a_device(tokens, want, tmp_path):
    with reserved_port() as port, worker(port):
        where = {"rpc_servers": f"127.0.0.1:{port}", "n_gpu_layers": -1, "kv_offload": "disk"}
        with pytest.raises(InvalidInput, match=r"there are some on RPC\d+; use .* offload_kqv=False"):
            new(embedded_model(), **SIZES, **where)
        with new(embedded_model(), **SIZES, **where, kv_offload_path=tmp_path, offload_kqv=False) as llm:
            llm.eval(tokens[:2000])
            assert llm.offload_usage().file_bytes > 0
            np.testing.assert_allclose(llm.scores[-1], want, atol=0.02)


def test_summaries_are_refused():
    with pytest.raises(InvalidInput, match=r"needs an index of the keys.*representation=keys2"):
        new(embedded_model(), **SIZES | {"method": "longheads,representation=minmax"}, kv_offload="disk")


# ---- what else a context does ----

FILE = {"kv_offload": "disk", "kv_offload_mib": 2}
# sums are in another order with a file than without one
SMALL = SIZES | {"method": "longheads,window=512", "n_batch": 256, "n_ubatch": 256, "deterministic": True}
STORY = (TEXT * 80).decode()


def answers(do, tmp_path) -> list:
    """Return what do(Llama's arguments) returns without a file and with one."""
    return [do(SMALL | file) for file in ({}, FILE | {"kv_offload_path": tmp_path})]


def answer(llm, prompt=STORY, n=12) -> str:
    return llm(prompt, max_tokens=n, temperature=0)["choices"][0]["text"]


def test_a_store_gives_its_rows_to_a_file(tmp_path):
    def do(arguments):
        store = {"kv_store": tmp_path / f"kv{'kv_offload' in arguments}"}
        with new(embedded_model(), **arguments, **store) as llm:
            first = answer(llm)
        with new(embedded_model(), **arguments, **store) as llm:
            return first, answer(llm), llm.kv_store_usage().tokens

    plain, file = answers(do, tmp_path)
    assert file == plain
    assert plain[0] == plain[1]
    assert plain[2] > 1000


def test_sequences_rewinds_and_states(tmp_path):
    def do(arguments):
        with new(embedded_model(), **arguments, n_parallel=3) as llm:
            found = [
                one["choices"][0]["text"]
                for one in llm.complete_many([STORY, STORY[:4000], STORY[200:]], max_tokens=6, temperature=0)
            ]
            llm.reset()
            llm.eval(llm.tokenize(STORY.encode())[:1500])
            state = llm.save_state()
            found += [answer(llm, STORY[:2000]), answer(llm, STORY[:2000] + " And"), answer(llm)]
            llm.load_state(state)
            return [*found, answer(llm)]

    plain, file = answers(do, tmp_path)
    assert file == plain


@pytest.mark.parametrize("n_tokens", [3, 8])
def test_drafts_are_verified(tmp_path, n_tokens):
    def do(arguments):
        with new(embedded_model(), **arguments, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=n_tokens)) as llm:
            return answer(llm, n=32)

    plain, file = answers(do, tmp_path)
    assert file == plain


def test_drafts_read_the_buffer_and_their_check_reads_the_file(tmp_path):
    """A text is the same with drafts and without, since rows of a verified token do not depend on the buffer."""
    arguments = SMALL | FILE | {"kv_offload_path": tmp_path}
    exact = arguments | {"method": "longheads,window=512,position=full,select_from=4096"}
    with new(embedded_model(), **exact) as llm:
        want = answer(llm, n=32)
    with new(embedded_model(), **arguments | {"method": "full"}, draft="longheads,window=512") as llm:
        assert answer(llm, n=32) == want
        assert llm.offload_usage().read_bytes > 0


def test_chunks_that_were_read_are_traced(tmp_path):
    def do(arguments):
        with new(embedded_model(), **arguments) as llm:
            tokens = llm.tokenize(STORY.encode())[:1600]
            context = llm.session.context
            context.start_trace(1590, 1600)
            llm.eval(tokens)
            return context.read_trace()[1]

    plain, file = answers(do, tmp_path)
    np.testing.assert_array_equal(file, plain)
