"""A Completer that generates tokens one at a time, and for several prompts together."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pylongctx.completions.batch import Answered, complete_together
from pylongctx.completions.grammar import constraint
from pylongctx.completions.options import Grammar, SamplerOptions, flattened
from pylongctx.completions.request import Prompt, prompt_tokens, sampling_params
from pylongctx.completions.results import Completion
from pylongctx.completions.tokenizer import LlamaTokenizer
from pylongctx.engine.drafting import DraftModel, check_draft, check_model
from pylongctx.engine.sampling.sampler import Processors, Sampler, StoppingCriteria, process
from pylongctx.local import LocalCompleter

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GeneratingCompleter(LocalCompleter):
    """A LocalCompleter that converts between text and tokens, chooses tokens, and completes several prompts at once.

    Parameters
    ----------
    opened : Opened
        The model and its context.
    """

    # ---- the vocabulary ----

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Return the token ids of UTF-8 bytes; ``special`` parses the texts of special tokens.

        Examples
        --------
        >>> llm.detokenize(llm.tokenize(b"It was"))
        b'It was'
        """
        return self._model.tokenize(text, add_bos, special)

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """Return the bytes of tokens; a space right after a leading BOS token is dropped."""
        return self._model.detokenize(tokens, special)

    def tokenizer(self) -> LlamaTokenizer:
        """Return an object with ``encode`` and ``decode`` on str.

        Examples
        --------
        >>> llm.tokenizer().decode(llm.tokenizer().encode("It was"))
        'It was'
        """
        return LlamaTokenizer(self._model)

    def n_embd(self) -> int:
        """Return the embedding size of the model."""
        return int(self._model.info.n_embd)

    def n_vocab(self) -> int:
        """Return the size of the vocabulary."""
        return int(self._model.info.n_vocab)

    def token_bos(self) -> int:
        """Return the beginning-of-sequence token; -1 if there is none."""
        return int(self._model.info.token_bos)

    def token_eos(self) -> int:
        """Return the end-of-sequence token; -1 if there is none."""
        return int(self._model.info.token_eos)

    def token_nl(self) -> int:
        """Return the newline token; -1 if there is none."""
        return int(self._model.info.token_nl)

    # ---- one token ----

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
        grammar: Grammar | None = None,
        idx: int | None = None,
        **more: Unpack[SamplerOptions],
    ) -> int:
        """Choose a token from the logits after the last token, or after token ``idx`` with logits_all.

        The other parameters are those of ``create_completion``.

        Examples
        --------
        >>> llm.reset()
        >>> llm.eval(llm.tokenize(b"It was the best of"))
        >>> llm.sample(temp=0) == int(llm.scores[-1].argmax())
        True
        """
        params = sampling_params(flattened(locals()), self._seeds, self.last_n_tokens_size)
        session = self.session
        with session.lock:
            row = session.row(idx)
            sampler = Sampler(self._model, params, constraint(grammar), session.tokens)
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
        stopping_criteria: StoppingCriteria | None = None,
        grammar: Grammar | None = None,
        **more: Unpack[SamplerOptions],
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yield tokens that continue ``tokens`` endlessly; ``.send(tokens)`` appends tokens after the last one.

        With ``reset``, ``tokens`` are the whole sequence, whose cached prefix is reused;
        without, they follow the current tokens. The other parameters are those of ``create_completion``.

        Examples
        --------
        >>> for token in llm.generate(llm.tokenize(b"It was"), temp=0):
        ...     if token == llm.token_eos() or llm.n_tokens > 8:
        ...         break
        """
        params = sampling_params(flattened(locals()), self._seeds, self.last_n_tokens_size)
        before = tokens if reset else [*self.session.tokens.tolist(), *tokens]
        sampler = Sampler(self._model, params, constraint(grammar), before)
        asked = {"processors": logits_processor, "criteria": stopping_criteria, "follows": not reset}
        return self._generate(tokens, sampler, asked)

    def _generate(
        self, tokens: Sequence[int], sampler: Sampler, asked: Mapping[str, Any]
    ) -> Generator[int, Sequence[int] | None, None]:
        solo = self._solo
        drawn = solo.drawn(solo.endless(tokens, sampler, **asked))
        sent: Sequence[int] | None = None
        while True:
            try:
                token, _ = drawn.send(sent)
            except StopIteration:
                return
            sent = yield token
            sent = self._model.check_tokens(sent).tolist() if sent else None

    @property
    def draft_model(self) -> DraftModel | None:
        """The draft model; a new one is used from the next generation on."""
        return self._solo.draft_model

    @draft_model.setter
    def draft_model(self, model: DraftModel | None) -> None:
        check_draft(model, self.session.method)
        check_model(model, self.session.model)
        self._solo.draft_model = model

    # ---- several prompts ----

    def complete_many(
        self,
        prompts: Sequence[Prompt],
        progress: Callable[[int, int], None] | None = None,
        model: str | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Return the completion of each prompt, in order.

        They run concurrently on the ``n_parallel`` sequences of the object. A common prefix of prompts is evaluated
        once. The tokens of ``session`` may change.

        Parameters
        ----------
        prompts : list
            Texts, or lists of tokens.
        progress : callable or None
            Called as ``progress(n_done, n_prompts)`` after each answer.
        model : str or None
            The model's name in answers.
        **options
            Options of ``create_completion`` for all prompts. A seed applies to every prompt.

        Raises
        ------
        ValueError
            When a prompt is empty or does not fit into the context (PromptTooLong); then nothing is evaluated.

        Examples
        --------
        >>> answers = llm.complete_many(["It was the best", "It was the worst"], max_tokens=2, temperature=0)
        >>> [answer["usage"]["completion_tokens"] for answer in answers]
        [2, 2]
        """
        return [answer.completion for answer in self.answer_many(prompts, progress, model, **options)]

    def answer_many(
        self,
        prompts: Sequence[Prompt],
        progress: Callable[[int, int], None] | None = None,
        model: str | None = None,
        **options: Any,
    ) -> list[Answered]:
        """Run ``complete_many``, and also return the tokens of each answer."""
        solo, name, n = self._solo, self._name if model is None else model, len(prompts)
        for prompt in prompts:
            if (n_tokens := len(prompt_tokens(solo, prompt))) >= solo.n_ctx:
                raise solo.session.too_long(n_tokens)
        generations = (self.generation(prompt, **options) for prompt in prompts)
        with solo.turn():
            return complete_together(solo, generations, name, lambda i: progress and progress(i, n))
