"""Call functions of the C API with random arguments.

Usage: calls_driver.py MODEL.gguf METHOD FIRST LAST STEP (see tries.py)

Pointers are valid for what lctx.h says that they hold; numbers are anything. After every call that is refused the
sequences are as long as before, and after a round the context works as when it was made.
"""

import random
import sys
import tempfile

import numpy as np
from session import Session
from tries import tell, tries

from pylongctx._lib import ffi, lib

SIZES = {"n_ctx": 256, "n_batch": 48, "n_ubatch": 16, "n_seq_max": 3, "n_threads": 1, "n_threads_batch": 1}
NUMBERS = (-(2**31), -99, -2, -1, 0, 1, 2, 3, 7, 16, 30, 59, 60, 61, 99, 255, 256, 257, 2**20, 2**31 - 1)
FLOATS = (float("nan"), float("inf"), -float("inf"), -1e30, -1.0, -0.0, 0.0, 1e-30, 0.5, 1.0, 2.0, 1e30)


class Caller:
    """Random calls on one context."""

    def __init__(self, session: Session, method: str, rng: random.Random, drafts: bool) -> None:
        self.drafts = drafts
        self.session, self.ctx, self.has_method, self.rng = session, session.ctx, bool(method), rng
        self.waits = method.endswith("kvzip")
        self.has_gaps = False  # in positions of a sequence, which no method allows: a cut may then leave less

    def number(self) -> int:
        return self.rng.choice(NUMBERS)

    def lengths(self) -> list[int]:
        return [self.session.length(seq) for seq in range(SIZES["n_seq_max"])]

    # ---- sequences ----

    def decode(self) -> None:
        n, before = self.rng.randrange(1, 49), self.lengths()
        seqs = [self.rng.randrange(3) for _ in range(n)]
        pos, tokens = [], [self.rng.randrange(3, 100) for _ in range(n)]
        after = list(before)
        for seq in seqs:
            pos.append(after[seq])
            after[seq] += 1
        spoil = self.rng.randrange(6)
        if spoil < 3:
            (seqs, pos, tokens)[spoil][self.rng.randrange(n)] = self.number()
        logits = ffi.new("float[]", n * self.session.n_vocab)
        status = lib.lctx_decode_batch(
            self.ctx, n, tokens, pos, seqs, [self.rng.randrange(2) for _ in range(n)], logits
        )
        if spoil >= 3:
            assert status in (lib.LCTX_OK, lib.LCTX_NO_SLOT), self.session.error
        if status == lib.LCTX_OK:
            assert self.lengths() == after or spoil < 3
            self.has_gaps |= spoil < 3
        else:
            assert self.lengths() == before
            assert self.session.error

    def decode_none(self) -> None:
        before = self.lengths()
        n = self.rng.choice([number for number in NUMBERS if not 1 <= number <= 48])
        assert lib.lctx_decode(self.ctx, [1], n, self.number(), ffi.NULL, 0) == lib.LCTX_INVALID
        assert self.lengths() == before

    def draft(self) -> None:
        """Steps of the MTP block after sequences that it knows, or with something that is wrong."""
        before = self.lengths()
        known = [seq for seq in range(3) if lib.lctx_mtp_ready(self.ctx, seq)]
        seqs = self.rng.sample(known, self.rng.randrange(len(known) + 1))
        for step in range(3):
            tokens, pos = [self.rng.randrange(3, 100) for _ in seqs], [before[seq] + step for seq in seqs]
            used, spoil = list(seqs), self.rng.randrange(9) if seqs else 9
            if spoil < 3:
                (used, pos, tokens)[spoil][self.rng.randrange(len(seqs))] = self.number()
            logits = ffi.new("float[]", 3 * self.session.n_vocab)
            n = len(seqs) if spoil != 3 else self.rng.choice([-1, 0, 4, 2**31 - 1])
            status = lib.lctx_mtp_step(self.ctx, n, tokens, pos, used, logits)
            if seqs and spoil > 3:
                assert status == lib.LCTX_OK or max(pos) >= SIZES["n_ctx"], self.session.error
            assert status == lib.LCTX_OK or self.session.error
            assert self.lengths() == before
            if status != lib.LCTX_OK or spoil < 3:
                break
        lib.lctx_mtp_ready(self.ctx, self.number())

    def seq_rm(self) -> None:
        before, seq = self.lengths(), self.number()
        if self.rng.random() < 0.5:
            seq = self.rng.randrange(3)
        p0, p1 = self.number(), self.number()
        done = lib.lctx_seq_rm(self.ctx, seq, p0, p1)
        if not done:
            assert self.lengths() == before
            assert self.session.error
        elif p1 < 0 or p1 >= before[seq]:
            left, want = self.session.length(seq), min(before[seq], max(p0, 0))
            assert left == want or (p1 >= 0 and p1 <= max(p0, 0)) or (self.has_gaps and left < want)
        else:
            assert self.lengths() == before
            self.has_gaps |= max(p0, 0) < p1

    def seq_cp(self) -> None:
        before, src, dst, n = self.lengths(), self.rng.randrange(3), self.rng.randrange(3), self.number()
        if self.rng.random() < 0.3:
            src, dst = self.rng.sample([src, self.number()], 2)
        done = lib.lctx_seq_cp(self.ctx, src, dst, n)
        want = list(before)
        if done and src != dst:
            want[dst] = before[src] if n < 0 else min(n, before[src])
        found = self.lengths()
        if self.has_gaps and done and found[dst] < want[dst]:
            want[dst] = found[dst]
        assert found == want
        assert done or self.session.error

    def seq_keep(self) -> None:
        before, seq = self.lengths(), self.number()
        lib.lctx_seq_keep(self.ctx, seq)
        kept = [n if s == seq else 0 for s, n in enumerate(before)]
        assert self.lengths() == (kept if 0 <= seq < 3 else before)

    def compress(self) -> None:
        """Replay and compress, in any order, of anything."""
        before, seq = self.lengths(), self.rng.choice([self.number(), *range(3)])
        most = lib.lctx_seq_replay(self.ctx, seq, self.rng.choice([1, 1, 0, -1]))
        assert most >= 0 or self.session.error
        if self.rng.random() < 0.5:
            share = self.rng.choice([0.0, 0.01, 0.3, 0.5, 1.0, 1.1, -1.0, float("nan"), float("inf")])
            done = lib.lctx_seq_compress(self.ctx, seq, share)
            assert 0 < share <= 1 if done else self.session.error
        assert self.lengths() == before

    def checkpoint(self) -> None:
        before = self.lengths()
        lib.lctx_seq_checkpoint(self.ctx, self.number())
        assert self.lengths() == before

    # ---- questions ----

    def ask(self) -> None:
        before, seq, n = self.lengths(), self.number(), self.number()
        most = lib.lctx_seq_restorable(self.ctx, seq, n)
        assert 0 <= most <= (before[seq] if 0 <= seq < 3 else 0)
        assert lib.lctx_context_step(self.ctx, self.number(), n) >= 1
        lib.lctx_context_cut_before(self.ctx, n)
        rows = ffi.new("int32_t[]", SIZES["n_ctx"])
        n_saved = lib.lctx_seq_checkpoints(self.ctx, seq, rows, min(n, SIZES["n_ctx"]))
        assert 0 <= n_saved <= (before[seq] if 0 <= seq < 3 else 0)
        held = lib.lctx_seq_held(self.ctx, seq, self.number(), self.number(), rows, rows, min(n, SIZES["n_ctx"]))
        assert 0 <= held <= SIZES["n_ctx"]
        info, offload, work = (ffi.new(f"lctx_{name} *") for name in ("kv_info", "offload_info", "work"))
        for status in (
            lib.lctx_kv_usage(self.ctx, info, ffi.NULL),
            lib.lctx_offload_usage(self.ctx, offload),
            lib.lctx_context_work(self.ctx, work),
        ):
            assert status == (lib.LCTX_OK if self.has_method else lib.LCTX_INVALID)
        assert self.lengths() == before

    def trace(self) -> None:
        if lib.lctx_trace_start(self.ctx, self.number(), self.number(), self.number()) == lib.LCTX_OK:
            self.decode()
            info = ffi.new("lctx_trace_info *")
            lib.lctx_trace_get(self.ctx, info, ffi.NULL, ffi.NULL)
            lib.lctx_trace_start(self.ctx, 0, 0, 0)

    # ---- states ----

    def state(self) -> None:
        before, seq = self.lengths(), self.number()
        if self.rng.random() < 0.7:
            seq = self.rng.randrange(-1, 3)
        size = lib.lctx_state_size(self.ctx, seq)
        assert (size > 0) == (seq < 3)
        data = ffi.new("uint8_t[]", max(size, 1))
        n = lib.lctx_state_get(self.ctx, seq, data, min(size, self.rng.choice([0, 1, 50, size, size])))
        assert self.lengths() == before
        target = self.rng.choice([seq, seq, self.number()])
        if lib.lctx_state_set(self.ctx, target, data, n):
            assert n == size
            want = before if target < 0 else [before[seq] if s == target else old for s, old in enumerate(before)]
        else:
            want = [0 if s == target or target < 0 else old for s, old in enumerate(before)]
            assert self.session.error
        assert self.lengths() == want

    def parts(self) -> None:
        """Append rows of one sequence to another, wherever they were read."""
        before, seq, target = self.lengths(), self.rng.choice([0, 1, 2, self.number()]), self.rng.randrange(3)
        end = before[seq] if 0 <= seq < 3 and self.rng.random() < 0.7 else self.number()
        first = self.rng.choice([0, 0, 64, self.number()])
        size = lib.lctx_slice_get(self.ctx, seq, first, end, ffi.NULL, 0)
        data = ffi.new("uint8_t[]", max(size, 1))
        assert lib.lctx_slice_get(self.ctx, seq, first, end, data, size) == size
        if self.rng.random() < 0.3:
            data[self.rng.randrange(max(size, 1))] ^= 1 << self.rng.randrange(8)
        whole = self.rng.random() < 0.3
        skip, n = self.number(), self.rng.choice([end - first, 5, self.number()]) if not whole else end - first
        if whole:
            done = lib.lctx_slice_append(self.ctx, target, data, size)
        else:
            done = lib.lctx_slice_insert(self.ctx, target, data, size, skip, max(-(2**31), min(n, 2**31 - 1)))
        assert done or self.session.error
        want = [old + (n if done and s == target else 0) for s, old in enumerate(before)]
        assert self.lengths() == want

    def drop(self) -> None:
        before, seq = self.lengths(), self.rng.choice([0, 1, 2, self.number()])
        first, end = sorted(self.rng.choice([self.number(), self.rng.randrange(256)]) for _ in range(2))
        done = lib.lctx_seq_drop(self.ctx, seq, first, end)
        assert done or self.session.error
        assert self.lengths() == [old - (end - first if done and s == seq else 0) for s, old in enumerate(before)]
        for s, n in enumerate(self.lengths()):
            assert 0 <= lib.lctx_seq_exact(self.ctx, s) <= n

    # ---- sampler, log-probabilities, vocabulary ----

    def sampler(self) -> None:
        params = ffi.new("lctx_sampler_params *")
        lib.lctx_sampler_params_default(params)
        kinds = {name: field.type.cname for name, field in ffi.typeof("lctx_sampler_params").fields}
        held = ("n_logit_bias", "n_dry_breakers", "n_before")  # how many a pointer holds
        names = [name for name, kind in kinds.items() if "*" not in kind and name not in held]
        for name in self.rng.sample(names, 3):
            kind = kinds[name]
            value = self.rng.choice(FLOATS) if kind == "float" else self.number()
            setattr(params, name, value & 0xFFFFFFFF if kind == "uint32_t" else value)
        n = self.rng.randrange(4)
        biased, values = ffi.new("int32_t[]", [self.number() for _ in range(4)]), ffi.new("float[]", 4)
        values[0] = self.rng.choice(FLOATS)
        params.n_logit_bias, params.logit_bias_tokens, params.logit_bias_values = n, biased, values
        params.n_before, params.before = n, biased
        breakers = [ffi.new("char[]", text) for text in (b"", b"\n", b"\xff", b"x" * 60)]
        pointers = ffi.new("char *[]", breakers)
        params.n_dry_breakers, params.dry_breakers = self.rng.choice([-1, 0, len(breakers)]), pointers
        letters = ffi.new("char[]", bytes(self.rng.choices(b"edskypmxtaiZ\xff", k=self.rng.randrange(6))))
        params.samplers = self.rng.choice([ffi.NULL, letters])
        sampler = lib.lctx_sampler_create(self.session.model, params)
        logits = np.random.default_rng(self.rng.randrange(99)).normal(size=self.session.n_vocab).astype(np.float32)
        for _ in range(self.rng.randrange(3)):
            logits[self.rng.randrange(len(logits))] = self.rng.choice(FLOATS)
        probs = np.empty_like(logits)
        if sampler != ffi.NULL:
            for _ in range(3):
                token = lib.lctx_sampler_sample(sampler, ffi.from_buffer("float[]", logits), len(logits))
                assert -1 <= token < len(logits)
                status = lib.lctx_sampler_probs(sampler, ffi.from_buffer("float[]", probs), len(probs))
                assert status == (lib.LCTX_INVALID if token < 0 else lib.LCTX_OK)
            assert lib.lctx_sampler_probs(sampler, ffi.NULL, len(probs) + 1) == lib.LCTX_INVALID
            assert lib.lctx_sampler_sample(sampler, ffi.from_buffer("float[]", logits), self.rng.choice([-1, 0])) == -1
            lib.lctx_sampler_free(sampler)

    def logprobs(self) -> None:
        n_vocab = self.rng.choice([-1, 0, 1, 50])
        logits = ffi.new("float[]", [self.rng.choice(FLOATS) for _ in range(100)])
        tokens, own = ffi.new("int32_t[]", [self.number(), self.number()]), ffi.new("float[]", 2)
        top_tokens, top = ffi.new("int32_t[]", 100), ffi.new("float[]", 100)
        n_top = self.rng.choice([-1, 0, 1, 50, 51])
        lib.lctx_logprobs(logits, self.rng.choice([-1, 0, 1, 2]), n_vocab, tokens, own, n_top, top_tokens, top)

    def vocabulary(self) -> None:
        model, piece, ids = self.session.model, ffi.new("char[]", 64), ffi.new("int32_t[]", 64)
        lib.lctx_token_to_piece(model, self.number(), piece, self.rng.choice([0, 1, 64]), self.number())
        lib.lctx_token_is_eog(model, self.number())
        text = self.rng.randbytes(20)
        lib.lctx_tokenize(model, text, self.rng.randrange(21), ids, self.rng.choice([0, 1, 64]), self.number(), 1)
        for meta in (lib.lctx_model_meta_key, lib.lctx_model_meta_val):
            meta(model, self.number(), piece, self.rng.choice([0, 1, 64]))
        info = ffi.new("lctx_device_info *")
        lib.lctx_device_get(self.number(), info)
        lib.lctx_device_attends(b"CPU", self.number(), self.number())
        lib.lctx_type_name(self.number())

    def embed(self) -> None:
        lengths, tokens = (
            [self.number() for _ in range(3)],
            [self.rng.choice([3, 5, self.number()]) for _ in range(300)],
        )
        out = ffi.new("float[]", 300 * 256)
        lib.lctx_embed(self.ctx, self.rng.choice([-5, 0, 1, 3]), lengths, tokens, out)

    def context(self) -> None:
        params = ffi.new("lctx_context_params *")
        lib.lctx_context_params_default(params)
        params.n_ctx, params.n_threads, params.n_threads_batch = 256, 1, 1
        fields = dict(ffi.typeof("lctx_context_params").fields)
        folder = ffi.new("char[]", self.rng.choice([b"", b"/", b"/nowhere", b"/proc", tempfile.gettempdir().encode()]))
        for name in self.rng.sample(sorted(fields), 2):
            kind = fields[name].type.cname
            if kind == "float":
                setattr(params, name, self.rng.choice(FLOATS))
            elif kind == "char *":
                params.kv_offload_folder = folder
                params.kv_offload = self.rng.choice([0, 1, 1 << 24, 2**64 - 1])
            else:
                few = name in (
                    "n_threads",
                    "n_threads_batch",
                    "n_seq_max",
                    "n_ctx",
                )  # more would take all of the machine
                value = self.rng.choice([-1, 0, 1, 2, 2**31 - 1]) if few else self.number()
                setattr(params, name, value % 2 ** (64 if "64" in kind else 32) if kind.startswith("u") else value)
        method = self.rng.choice(["", "full", "window", "corm,window=8,recent=24,evict_every=16", "longheads"])
        ctx = lib.lctx_context_create(self.session.model, params, method.encode())
        if lib.lctx_context_error(ctx) == ffi.NULL:
            logits = ffi.new("float[]", self.session.n_vocab)
            lib.lctx_decode(ctx, [5, 6, 7], 3, 0, logits, 0)
        lib.lctx_context_free(ctx)

    def any(self) -> None:
        usual = (
            [self.decode] * 6
            + [self.draft] * 6 * self.drafts
            + [self.seq_rm, self.seq_cp, self.state, self.ask, self.checkpoint]
        )
        rare = [self.seq_keep, self.decode_none, self.trace, self.sampler, self.logprobs, self.vocabulary]
        rare += [self.parts, self.parts, self.drop, self.drop, self.compress] + [self.compress] * 6 * self.waits
        rare += [self.draft, self.context] + ([] if self.has_method else [self.embed])
        self.rng.choice(usual if self.rng.random() < 0.7 else rare)()


def main() -> None:
    path, method, *seeds = sys.argv[1:]
    lib.lctx_log_set_level(0)
    drafts = "-nextn" in path  # the models that have a block for that
    with Session(ffi, lib, path, method, {"mtp": drafts}, **SIZES, mtp=drafts) as session:
        text = list(range(3, 40))
        want = session.decode(text)
        for seed in tries(*seeds):
            caller = Caller(session, method, random.Random(seed), drafts)
            for _ in range(20):
                caller.any()
                session.check()
            session.clear()
            np.testing.assert_array_equal(session.decode(text), want)
            tell(used=True)


if __name__ == "__main__":
    main()
