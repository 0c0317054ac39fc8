"""Random requests to several sequences of one engine; see ``random_requests.py``."""

import random
from contextlib import contextmanager, nullcontext, suppress
from threading import Event

import numpy as np
from llamas import EXACT, TEXT, new
from random_requests import LONGEST, SIZES, Fresh, Texts, lose_a_file
from session import assert_same

from pylongctx import LlamaDraftModel, ModelDraft
from pylongctx.engine.drafting import Drafting, DraftRequest
from pylongctx.engine.job import Job
from pylongctx.engine.sampling.params import SamplingParams
from pylongctx.engine.sampling.sampler import Sampler
from pylongctx.engine.thread import EngineThread
from pylongctx.errors import Aborted, ContextFull
from pylongctx.parallel import Host

PATIENCE = 60.0  # seconds until an answer that does not come is an error


class Served:
    """Several sequences of one engine that are asked together at random; see ``Requests``.

    Jobs are cancelled and aborted, sequences erased, and with ``kv_limit`` there is no room for all.
    """

    ABORTS = 0.2  # of the steps

    def __init__(self, path, method, seed, folder=None, **settings):
        self.rng = random.Random(seed)
        self.texts, self.fresh, self.folder = Texts(self.rng), Fresh(path, method=method), folder
        given = {"n_threads": 1, "n_threads_batch": 1, "verbose": False, "kv_store": folder, "method": method}
        self.host = Host(str(path), 3, **given | SIZES | settings)
        self.engine = EngineThread(self.host.sessions, self.host.library)
        self.limited = "kv_limit" in settings
        self.n_reused = self.n_step = 0

    def close(self):
        self.engine.close()
        self.host.close()
        self.fresh.llm.close()

    def run(self, n):
        """Take ``n`` steps; an error says which one it was."""
        for self.n_step in range(n):
            try:
                self.step()
            except BaseException as reason:
                reason.add_note(f"step {self.n_step}")
                raise

    def step(self):
        jobs = [self.job() for _ in range(self.rng.randrange(1, 6))]
        held = Event()
        self.engine.call(held.wait)
        for job in jobs:
            self.engine.submit(job)
        aborts = self.rng.random() < self.ABORTS
        with self._aborting(self.rng.randrange(9)) if aborts else nullcontext():
            held.set()
            cancelled = [job for job in jobs if self.rng.random() < 0.15]
            for job in cancelled:
                if self.rng.random() < 0.5:
                    job.results.get(timeout=PATIENCE)
                self.engine.cancel(job)
            for job in jobs:
                if job not in cancelled:
                    self.finish(job, (Aborted,) * aborts + (ContextFull,) * self.limited)
        if self.rng.random() < 0.2:
            seq = self.rng.randrange(len(self.host.sessions))
            with suppress(ValueError):  # it is busy with what was cancelled
                self.engine.erase(seq, self.host.sessions[seq].owner).result(PATIENCE)
        if self.folder and self.rng.random() < 0.2:
            lose_a_file(self.host.store, self.folder, self.rng)

    @contextmanager
    def _aborting(self, at):
        """Let one of the next steps end before it begins, or in the native code."""
        context, left, native = self.engine.context, [at], self.rng.random() < 0.5
        decode = context.decode

        def failing(*args):
            left[0] -= 1
            if left[0] != -1:
                return decode(*args)
            if not native:
                raise Aborted("stopped", -1)
            context.abort = True
            try:
                return decode(*args)
            finally:
                context.abort = False

        context.decode = failing
        try:
            yield
        finally:
            del context.decode

    def job(self):
        owner, reuses = self.rng.choice([None, None, "somebody"]), self.rng.random() < 0.9
        return self.job_of(self.texts.next(), owner=owner, reuses=reuses)

    def job_of(self, text, **fields):
        """Return a job of few tokens: it ends and leaves its sequence even if they are not taken."""
        sampler = Sampler(self.host.model, SamplingParams(seed=1, temp=0.0))
        return Job(np.array(text, np.int32), sampler, self.rng.randrange(1, 5), with_rows=True, **fields)

    def finish(self, job, allowed):
        said, rows = [], []
        try:
            for token, row in job.drawn(lambda: take(job)):
                rows.append(row)
                said.append(token)
        except allowed:
            return
        assert len(rows) == job.limit or self.host.model.ends_generation(said[-1])
        for i in {0, len(rows) - 1}:
            try:
                self.compare(rows[i], job.tokens.tolist(), said[:i])
            except AssertionError as reason:
                reason.add_note(f"{len(job.tokens)} tokens, {job.n_cached} cached, {job.n_stored} stored, {i} said")
                raise
        assert job.n_cached + job.n_read == len(job.tokens)
        self.n_reused += job.n_cached

    def compare(self, row, prompt, said):
        self.fresh.check(row, prompt + said)


class ServedReading(Served):
    """The same with documents, which an object has read whose answers are compared."""

    ABORTS = 0.0  # a document whose reading is aborted is read in place

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        words = TEXT.decode().split()
        self.written = [" ".join(self.rng.choices(words, k=40)) for _ in range(5)]
        for text in self.written:
            self.fresh.llm.read(text)
            self.engine.documents.add(text)  # is read before the first prompt that has it

    def job(self):
        text = self.texts.next()[:60]
        for written in self.rng.sample(self.written, self.rng.randrange(4)):
            text += self.host.model.tokenize(written.encode(), False, False) + self.texts.some(self.rng.randrange(4))
        text = text[:LONGEST]
        self.texts.known.append(text)
        placed = self.engine.documents.find(np.array(text, np.int32))
        return self.job_of(text, placed=placed)

    def compare(self, row, prompt, said):
        fresh = self.fresh.llm
        fresh.reset()
        fresh.prefill(prompt)
        if said:
            fresh.eval(said)
        assert_same(row, fresh.session.last_logits, EXACT)


class Guessing(LlamaDraftModel):
    """Drafts what the model says, with wrong tokens among them."""

    def __init__(self, llm, rng):
        self.exact, self.rng = ModelDraft(llm, n_max=3), rng

    def __call__(self, input_ids, /, **kwargs):
        return self.draft_all([DraftRequest(input_ids, 3)])[0]

    def draft_all(self, requests):
        drafts = self.exact.draft_all(requests)
        for draft in drafts:
            if len(draft) and self.rng.random() < 0.5:
                draft[self.rng.randrange(len(draft))] ^= 1
        return drafts


class ServedDrafting(Served):
    """The same with drafts, of a draft model with fewer sequences than the engine."""

    def __init__(self, path, method, seed, folder=None, **settings):
        super().__init__(path, method, seed, folder, **settings)
        self.small = new(path, method=method, n_parallel=2, **SIZES)
        self.guessing = Guessing(self.small, self.rng)

    def close(self):
        super().close()
        self.small.close()

    def job_of(self, text, **fields):
        return super().job_of(text, draft=Drafting(self.guessing), **fields)

    def run(self, n):
        super().run(n)
        counters = self.engine.counters
        assert 0 < counters.accepted_tokens < counters.drafted_tokens


def take(job):
    """Return the next result of a job, in less time than a test may take."""
    result = job.results.get(timeout=PATIENCE)
    if job.stalled:
        job.wake()
    if isinstance(result, BaseException):
        raise result
    return result
