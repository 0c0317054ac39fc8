"""Sampling and completion: the part of llama_cpp.Llama's interface that makes tokens and text."""

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from pylongctx import completion
from pylongctx._arguments import check_count
from pylongctx._lib import ContextFull, lib
from pylongctx._saving import Saving
from pylongctx.completion import Request, StopFilter
from pylongctx.grammar import constraint
from pylongctx.logprobs import Entry, Scorer
from pylongctx.sampling import LogitsProcessor, Sampler, SamplingParams, StoppingCriteria, process, seed_sequence
from pylongctx.speculative import Drafting

Processors = LogitsProcessor | list[LogitsProcessor] | None
Criteria = StoppingCriteria | None
Chunk = TypeVar("Chunk")
Whole = TypeVar("Whole")

NUMBERS = (
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "temp",
    "repeat_penalty",
    "frequency_penalty",
    "presence_penalty",
    "mirostat_mode",
    "mirostat_tau",
    "mirostat_eta",
)
INFILL = "infill prompts differ between models: write that prompt, and pass it without suffix"


class Generation(Saving):
    """What Llama does with logits: ``sample``, ``generate``, ``create_completion``."""

    metadata: dict[str, str]
    last_n_tokens_size: int
    draft_model: Any
    _seeds: Iterator[int]

    def sample(
        self,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_eta: float = 0.1,
        mirostat_tau: float = 5.0,
        penalize_nl: bool = True,
        logits_processor: Processors = None,
        grammar: Any = None,
        idx: int | None = None,
    ) -> int:
        """Choose a token from the logits after the last token, or after token ``idx`` with logits_all."""
        sampler, session = Sampler(self._model, self._sampling(locals()), constraint(grammar)), self._session
        with session.lock:
            row = session.row(idx)
            return sampler.sample(process(logits_processor, session.tokens, row))

    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: Processors = None,
        stopping_criteria: Criteria = None,
        grammar: Any = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yield tokens that continue ``tokens``, without end; ``.send(tokens)`` injects tokens after the last one.

        With ``reset``, ``tokens`` are the whole sequence and what the cache holds of their beginning is reused;
        without, they follow the current tokens.
        """
        sampler = Sampler(self._model, self._sampling(locals()), constraint(grammar))
        return self._generate(tokens, sampler, reset, logits_processor, stopping_criteria)

    def _generate(
        self, tokens: Sequence[int], sampler: Sampler, reset: bool, processors: Processors, criteria: Criteria
    ) -> Generator[int, Sequence[int] | None, None]:
        session = self._session
        session.context.abort = False
        evaluate = session.eval if self.draft_model is None else Drafting(session, self.draft_model).eval
        with session.lock:
            pending = self._model.check_tokens(tokens, allow_empty=not reset and session.has_logits)
            if reset:
                session.check_room(len(pending))
                pending = session.reuse(pending)
            changes = session.changes
        while True:
            with self._session.lock:  # held between two yields only: a waiting generator blocks nobody
                session.check_changes(changes)
                if len(pending):
                    evaluate(pending)
                row, changes = session.last_logits, session.changes
                token = sampler.sample(process(processors, session.tokens, row))
                if criteria is not None and criteria(session.tokens, row):
                    return
            sent = yield token
            pending = self._model.check_tokens([token, *(sent or ())])

    def create_completion(
        self,
        prompt: str | list[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | list[str] | None = [],  # noqa: B006 - the default of llama_cpp, never changed
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: Criteria = None,
        logits_processor: Processors = None,
        grammar: Any = None,
        logit_bias: Mapping[int, float] | None = None,
    ) -> Any:
        """Complete a prompt; returns OpenAI's response dict, or with ``stream`` an iterator of chunks.

        Parameters
        ----------
        prompt : str or list of int
            Text, or tokens that are used as they are.
        max_tokens : int or None
            Most tokens to generate; None or <= 0: until the context is full.
        stop : str or list of str or None
            Strings that end the completion; neither they nor a part of them is returned.
        seed : int or None
            Seed of this call; None continues the object's seed, which is random unless one was given.

        logprobs : int or None
            Return the log-probability of each token and of the ``logprobs`` likeliest ones, before sampling
            changes them. With ``echo`` those of the prompt too, for which the whole prompt is evaluated again;
            the first token has one only when a BOS token precedes it.

        The last chunk of a stream holds ``usage``. The other parameters are those of llama_cpp.Llama.

        Raises
        ------
        ValueError
            When the prompt is empty or does not fit the context.
        NotImplementedError
            For suffix.
        """
        if suffix is not None:
            raise NotImplementedError(f"suffix: {INFILL}")
        sampler = Sampler(self._model, self._sampling(locals() | {"temp": temperature}), constraint(grammar))
        tokens = self._prompt_tokens(prompt)
        text = self._prompt_text(prompt)
        scorer = None if logprobs is None else Scorer(self._model, check_count("logprobs", logprobs, 0))
        request = Request(
            model_name=self.model_path if model is None else model,
            tokens=self._generate(tokens, sampler, True, logits_processor, stopping_criteria),
            piece=self._model.piece,
            ends=self._model.ends_generation,
            n_prompt=len(tokens),
            max_tokens=self._room(len(tokens), max_tokens),
            filter=StopFilter([stop] if isinstance(stop, str) else list(stop or []), strip_space=not prompt),
            offset=len(text),
            echo=partial(self._echo, tokens, text, isinstance(prompt, str), scorer) if echo else None,
            score=partial(self._score, scorer) if scorer else None,
            begin=partial(self._recall, tokens),
            end=self._remember,
        )
        if stream:
            return self._locked_steps(completion.stream(request))
        return self._locked(partial(completion.collect, request))

    __call__ = create_completion

    def _prompt_tokens(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in self._model.check_tokens(prompt)]
        info = self._model.info
        last = info.token_eos if info.token_sep < 0 else info.token_sep
        tokens = self._model.tokenize(prompt.encode(), False, True) if prompt else []
        if info.add_bos and info.token_bos >= 0:
            tokens = [info.token_bos, *tokens]
        if info.add_eos or info.token_sep >= 0:
            tokens = [*tokens, last]
        if not tokens:
            raise ValueError("the prompt is empty, and this model has no BOS token to start from")
        if tokens[:2] == [info.token_bos] * 2:
            warnings.warn("the prompt begins with the BOS token, which is added anyway", RuntimeWarning, stacklevel=3)
        return tokens

    def _room(self, n_prompt: int, max_tokens: int | None) -> int:
        """Return how many tokens may follow a prompt; ContextFull when none."""
        room = self._session.context.n_ctx - n_prompt
        if room <= 0:
            raise ContextFull(self._session.overflow_message(n_prompt), lib.LCTX_NO_SLOT)
        return min(max_tokens, room) if max_tokens and max_tokens > 0 else room

    def _echo(self, tokens: list[int], text: str, special: bool, scorer: Scorer | None) -> tuple[str, list[Entry]]:
        self._session.context.abort = False
        ids = np.array(tokens, np.int32)
        if scorer is None:
            return text, []
        self._session.clear()
        return text, scorer.prompt(self._session.eval_rows(ids), ids, text, special)

    def _score(self, scorer: Scorer, token: int, offset: int) -> Entry:
        return scorer.entry(token, self._session.last_logits, offset)

    def _locked(self, run: Callable[[], Whole]) -> Whole:
        with self._session.lock:
            return run()

    def _locked_steps(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        while True:
            with self._session.lock:
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk

    def _prompt_text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._model.detokenize(prompt).decode("utf-8", "ignore")

    def _sampling(self, given: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of a sampler from the arguments of a public method."""
        if given["tfs_z"] != 1.0 or not given.get("penalize_nl", True):
            warnings.warn("tfs_z and penalize_nl have no effect: llama.cpp removed them", RuntimeWarning, stacklevel=3)
        seed = given.get("seed")
        return SamplingParams(
            seed=next(self._seeds if seed is None else seed_sequence(seed)),
            penalty_last_n=self.last_n_tokens_size,
            logit_bias=given.get("logit_bias") or {},
            **{name: given[name] for name in NUMBERS},
        )
