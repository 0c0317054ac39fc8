"""Random requests to one object, and what another one says that evaluates each text from nothing."""

import random
from contextlib import contextmanager, suppress

import numpy as np
import stored
from llamas import EXACT, F32, TEXT, new
from session import assert_same

from pylongctx import LlamaPromptLookupDecoding, LlamaRAMCache
from pylongctx.engine import documents
from pylongctx.errors import Aborted
from pylongctx.store import finder, layout, library

N_CTX = 384
LONGEST = N_CTX - 40  # of a prompt, so that an answer follows
N_BLOCK = 64  # of the store, so that short texts have several
TILE = 64
SIZES = {"n_ctx": N_CTX, "n_ubatch": 32} | F32


def small_blocks(monkeypatch):
    """Let the store cut short texts into blocks, tails and points."""
    for module in (finder, library, layout):
        monkeypatch.setattr(module, "BLOCK", N_BLOCK)
    monkeypatch.setattr(layout, "SPACING", 2 * N_BLOCK)
    monkeypatch.setattr(library, "MIN_TAIL", 8)
    monkeypatch.setattr(documents, "MIN_SPAN", 40)
    monkeypatch.setattr(documents, "FRESH_TOKENS", 16)


class Texts:
    """Prompts that begin as earlier ones, and differ from them at some place."""

    def __init__(self, rng):
        self.rng = rng
        self.known = [self.some(100)]

    def some(self, n):
        """Return ``n`` ordinary tokens."""
        return [self.rng.randrange(3, 280) for _ in range(n)]

    def next(self):
        """Return a prompt, which later ones may begin as."""
        rng = self.rng
        base = rng.choice(self.known[-6:])
        at = rng.randrange(len(base) + 1)
        text = rng.choice(
            [
                lambda: base,
                lambda: base + self.some(rng.randrange(1, 20)),
                lambda: base + self.some(rng.randrange(1, 150)),
                lambda: base + self.some(N_BLOCK - len(base) % N_BLOCK),
                lambda: base[:at] + self.some(rng.randrange(1, 200)),
                lambda: base[:at] + self.some(rng.randrange(1, 9)) + base[at + rng.randrange(9) :],
                lambda: base[: max(1, at)],
                lambda: base[: max(1, at // N_BLOCK * N_BLOCK)],
                lambda: self.some(rng.randrange(1, LONGEST)),
            ]
        )()[:LONGEST]
        self.known.append(text)
        return list(text)


class Fresh:
    """The logits after texts, each evaluated from nothing."""

    def __init__(self, path, **settings):
        self.llm, self.known = new(path, **SIZES | settings), {}

    def __call__(self, tokens):
        key = tuple(tokens)
        if key not in self.known:
            self.known[key] = self.evaluated(tokens)
        return self.known[key]

    def evaluated(self, *parts):
        self.llm.reset()
        for part in parts:
            self.llm.eval(part)
        return self.llm.session.last_logits.copy()

    def check(self, got, tokens):
        """Hold logits together with those after some tokens.

        Heads that choose chunks may see two that are as good, so that the rounding of another batch decides: then they
        are those that this object gives when it takes the last tokens in other steps.
        """
        want = self(tokens)
        if self.llm.method is not None and self.llm.method.name == "longheads":
            for n in (1, 2, 3, 5, 8, 13, 21):
                if n < len(tokens) and difference(got, want) > EXACT:
                    want = self.evaluated(tokens[:-n], *([token] for token in tokens[-n:]))
        assert_same(got, want, EXACT)


class Requests:
    """A Llama that is asked at random.

    Parameters
    ----------
    path, method
        The model, and how it is opened; ``settings`` are arguments of ``Llama``.
    seed : int
        The order of what is asked.
    folder : Path or None
        Of its KV store.
    cached : bool
        Whether it has a cache of states.
    """

    def __init__(self, path, method, seed, folder=None, cached=False, **settings):
        self.rng = random.Random(seed)
        self.texts, self.fresh = Texts(self.rng), Fresh(path, method=method, **settings)
        self.cache = LlamaRAMCache() if cached else None
        self.folder = folder
        self.open = lambda: new(path, method=method, kv_store=folder, **SIZES | settings)
        self.llm, self.held = self.open(), []
        self.llm.set_cache(self.cache)
        self.states, self.kept = [], None
        self.n_prompt = self.n_reused = 0  # tokens
        self.log = []

    def close(self):
        self.llm.close()
        self.fresh.llm.close()

    @property
    def actions(self):
        own = [self.prefill] * 6 + [self.complete] * 4 + [self.generate] * 4
        own += [self.go_on, self.rewind, self.rewind, self.checkpoint, self.restore, self.restore, self.save, self.load]
        own += [self.echo, self.reset, self.abort, self.abort, self.abort]
        return own + ([self.lose_a_file, self.reopen, self.reopen, self.reopen] if self.folder else [])

    def step(self):
        """Do something, and compare what is held then with what a fresh object says."""
        action = self.rng.choice(self.actions)
        self.log.append(action.__name__)
        before = self.llm.session.n_evaluated - self.n_prompt
        action()
        session = self.llm.session
        self.n_reused += max(before - session.n_evaluated + self.n_prompt, 0) if action != self.reopen else 0
        assert session.tokens.tolist() == self.held
        if session.has_logits:
            self.compare()

    def compare(self):
        self.fresh.check(self.llm.session.last_logits, self.held)

    def run(self, n):
        """Take ``n`` steps; an error says what came before."""
        for _ in range(n):
            try:
                self.step()
            except BaseException as reason:
                reason.add_note(f"step {len(self.log)}: ... {', '.join(self.log[-12:])}")
                raise

    # ---- prompts ----

    def prompt(self):
        text = self.texts.next()
        self.n_prompt += len(text)
        return text

    def prefill(self):
        self.held = self.prompt()
        self.llm.prefill(self.held)
        assert self.llm.session.has_logits

    def complete(self):
        text = self.prompt()
        self.llm(text, max_tokens=self.rng.randrange(1, 9), temperature=0.0)
        self._answered(text)

    def generate(self):
        text = self.prompt()
        tokens = self.llm.generate(text, temp=0.0)
        said = [next(tokens) for _ in range(self.rng.randrange(1, 12))]
        if self.rng.random() < 0.5:
            tokens.close()
        self.held = text + said[:-1]

    def echo(self):
        text = self.prompt()
        self.llm.create_completion(text, max_tokens=1, echo=True, logprobs=1, temperature=0.0)
        self._answered(text)

    def _answered(self, text):
        self.held = self.llm.session.tokens.tolist()
        assert self.held[: len(text)] == text
        assert self.llm.session.has_logits

    def go_on(self):
        more = self.texts.some(self.rng.randrange(1, 30))
        if len(self.held) + len(more) < N_CTX:
            self.llm.eval(more)
            self.held = self.held + more
            assert self.llm.session.has_logits

    # ---- going back ----

    def rewind(self):
        self.held = self.held[: self.rng.randrange(len(self.held) + 1)]
        self.llm.n_tokens = len(self.held)

    def reset(self):
        self.llm.reset()
        self.held = []

    def checkpoint(self):
        self.kept = self.llm.checkpoint()

    def restore(self):
        if self.kept is not None:
            self.llm.restore()
            self.held = self.kept.input_ids.tolist()

    def save(self):
        self.states = [*self.states[-2:], self.llm.save_state()]

    def load(self):
        if self.states:
            state = self.rng.choice(self.states)
            self.llm.load_state(state)
            self.held = state.input_ids.tolist()

    # ---- trouble ----

    def abort(self):
        """End a request at one of its steps: before it, in the native code, or after it and before it is recorded."""
        how, at = self.rng.choice(["before", "native", "after"]), self.rng.randrange(6)
        with self._failing(how, at), suppress(Aborted, KeyboardInterrupt):
            self.rng.choice([self.prefill, self.complete, self.generate, self.go_on])()
        self.llm.session.context.abort = False
        self.held = self.llm.session.tokens.tolist()

    @contextmanager
    def _failing(self, how, at):
        context, left = self.llm.session.context, [at]
        decode = context.decode

        def failing(*args):
            left[0] -= 1
            if left[0] >= 0:
                return decode(*args)
            if how == "before":
                raise Aborted("stopped", -1)
            if how == "native":
                context.abort = True
            decode(*args)
            raise KeyboardInterrupt

        context.decode = failing
        try:
            yield
        finally:
            del context.decode

    def lose_a_file(self):
        lose_a_file(self.llm._opened.store, self.folder, self.rng)

    def reopen(self):
        """Continue with another object on the same store."""
        self.llm.close()
        self.llm, self.held, self.kept = self.open(), [], None
        self.llm.set_cache(self.cache)


class Drafting(Requests):
    """The same with guessed tokens, which are taken back."""

    def complete(self):
        self.llm.draft_model = self.rng.choice([None, LlamaPromptLookupDecoding(2, 5)])
        text = self.prompt()
        self.llm(text, max_tokens=self.rng.randrange(1, 25), temperature=0.0)
        self.llm.draft_model = None
        self._answered(text)


class Tiled(Requests):
    """Prompts of whole tiles, so that no token of one selected for itself what it selects in a longer one."""

    @property
    def actions(self):
        answers = (self.complete, self.generate, self.go_on, self.echo)
        return [action for action in super().actions if action not in answers]

    def prompt(self):
        text = super().prompt()
        whole = text[: max(len(text) // TILE, 1) * TILE]
        whole += self.texts.some(-len(whole) % TILE)
        self.n_prompt += len(whole) - len(text)
        self.texts.known.append(whole)
        return whole

    def abort(self):
        super().abort()
        self.held = self.held[: len(self.held) // TILE * TILE]
        self.llm.n_tokens = len(self.held)


class Reading(Requests):
    """The same with documents, compared with an object that has read the same ones and holds nothing else.

    What follows a prompt that was cut is not compared: its rows may be a document's or not.
    """

    def __init__(self, path, method, seed, **more):
        super().__init__(path, method, seed, **more)
        words = TEXT.decode().split()
        self.written = [" ".join(self.rng.choices(words, k=40)) for _ in range(5)]
        self.asked = 0  # of what is held, the prompt

    @property
    def actions(self):
        without = (self.reopen, self.go_on)  # another object has read nothing
        return [action for action in super().actions if action not in without] + [self.read] * 4 + [self.forget] * 2

    def prompt(self):
        text = super().prompt()
        self.n_prompt -= len(text)
        text = text[:60]
        for written in self.rng.sample(self.written, self.rng.randrange(4)):
            tokens = self.llm.tokenize(written.encode(), add_bos=False)
            if self.rng.random() < 0.2:
                tokens[self.rng.randrange(len(tokens))] = 7
            at = self.rng.choice([0, len(text), len(text)])
            text = [*text[:at], *tokens, *self.texts.some(self.rng.randrange(4)), *text[at:]][:LONGEST]
        self.texts.known.append(text)
        self.n_prompt += len(text)
        self.asked = len(text)
        return text

    def step(self):
        self.asked = 0
        super().step()

    def compare(self):
        if self.asked:
            fresh = self.fresh.llm
            fresh.reset()
            fresh.prefill(self.held[: self.asked])
            if self.held[self.asked :]:
                fresh.eval(self.held[self.asked :])
            assert_same(self.llm.session.last_logits, fresh.session.last_logits, EXACT)

    def read(self):
        text = self.rng.choice(self.written)
        self.fresh.llm.read(text)
        if self.rng.random() < 0.5:
            self.llm._solo.engine.documents.add(text)  # is read with the first prompt that has it
        else:
            self.llm.read(text)
        self.held = self.llm.session.tokens.tolist()

    def forget(self):
        known = [document.text for document in self.llm.documents]
        if known:
            text = self.rng.choice(known)
            self.llm.forget(text)
            self.fresh.llm.forget(text)

    def echo(self):
        super().echo()
        self.fresh.check(self.llm.session.last_logits, self.held)
        self.asked = 0  # nothing of it comes from documents

    def abort(self):
        super().abort()
        self.asked = 0


def lose_a_file(store, folder, rng):
    """Damage or remove a file of a store."""
    store.flush()
    files = stored.files(folder)
    if files:
        path = rng.choice(files)
        how = rng.choice(["flip", "torn", "zeros", "gone"])
        path.unlink() if how == "gone" else stored.damage(path, how, rng)


def difference(got, want):
    """Return how far apart logits are, relative to the largest."""
    return float(np.abs(got - want).max() / np.abs(want).max())
