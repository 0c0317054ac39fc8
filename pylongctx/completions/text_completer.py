"""Completions of prompts from any source of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from pylongctx._arguments import check_count
from pylongctx.completions import results
from pylongctx.completions.grammar import constraint
from pylongctx.completions.logprobs import Scorer
from pylongctx.completions.options import AnswerOptions, Grammar, flattened
from pylongctx.completions.request import Prompt, are_prompts, job_of, prompt_tokens, sampling_params, stop_words
from pylongctx.completions.results import Completion, Generation, StopFilter
from pylongctx.engine.overflow import halves
from pylongctx.engine.sampling.sampler import Sampler, SeedSequence
from pylongctx.engine.source import TokenSource

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pylongctx.completions.options import CompletionOptions
    from pylongctx.engine.model import Model
    from pylongctx.engine.sampling.sampler import Processors, StoppingCriteria

Chunk = TypeVar("Chunk", bound=Mapping[str, Any])

INFILL = "infill prompts differ between models: write the prompt yourself, and pass it without suffix"


class TextCompleter:
    """Completes prompts with OpenAI's response dicts, independent of slots and HTTP.

    Parameters
    ----------
    model : Model
        The model, for its vocabulary.
    source : TokenSource
        Generates the tokens.
    name : str
        The model's name in answers.
    seed : int or None
        Seed of the samplers; -1 or None: random.
    last_n_tokens_size : int
        Number of last tokens that penalties consider.
    """

    def __init__(
        self, model: Model, source: TokenSource, name: str, seed: int | None = None, last_n_tokens_size: int = 64
    ) -> None:
        self.last_n_tokens_size = check_count("last_n_tokens_size", last_n_tokens_size, 0)
        self._model = model
        self._source = source
        self._name = name
        self.set_seed(seed)

    def set_seed(self, seed: int | None) -> None:
        """Seed the sampler of the next run; -1 and None are random.

        Examples
        --------
        >>> llm.set_seed(7)
        """
        self._seeds = SeedSequence(seed)

    @overload
    def create_completion(
        self, prompt: Prompt | Sequence[Prompt], *, stream: Literal[False] = False, **options: Unpack[CompletionOptions]
    ) -> Completion: ...
    @overload
    def create_completion(
        self, prompt: Prompt | Sequence[Prompt], *, stream: Literal[True], **options: Unpack[CompletionOptions]
    ) -> Iterator[Completion]: ...
    @overload
    def create_completion(
        self, prompt: Prompt | Sequence[Prompt], *, stream: bool, **options: Unpack[CompletionOptions]
    ) -> Completion | Iterator[Completion]: ...

    def create_completion(
        self,
        prompt: Prompt | Sequence[Prompt],
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
        stopping_criteria: StoppingCriteria | None = None,
        logits_processor: Processors = None,
        grammar: Grammar | None = None,
        logit_bias: Mapping[int, float] | None = None,
        **more: Unpack[AnswerOptions],
    ) -> Completion | Iterator[Completion]:
        """Complete a prompt; returns OpenAI's response dict, or with ``stream`` an iterator of chunks.

        Parameters
        ----------
        prompt : str or list of int, or a list of them
            Text, or tokens that are used unchanged. A list of prompts: one completion with a choice for each, see
            ``complete_many``.
        suffix : str or None
            Not supported: raises NotImplementedError.
        max_tokens : int or None
            Maximum tokens to generate; None or <= 0: until the context is full. Only ``overflow="evict_middle"`` can
            generate more than fit: it evicts the older half of the text, except its first tokens.
        temperature, top_p, min_p, typical_p, top_k
            Sampling; ``temperature=0`` is greedy, ``top_k=0`` considers all tokens.
        logprobs : int or None
            Return the log-probability of each token and of the ``logprobs`` most likely ones, before sampling
            changes them. With ``echo`` also those of the prompt, for which the whole prompt is evaluated again;
            the first token has one only if a BOS token precedes it.
        echo : bool
            Prepend the prompt to the text.
        stop : str or list of str or None
            Strings that end the completion; they are not returned, not even in part.
        frequency_penalty, presence_penalty, repeat_penalty
            Penalties for the last ``last_n_tokens_size`` generated tokens.
        stream : bool
            Yield chunks as they are generated; the last one has ``usage``.
        seed : int or None
            Seed of this call; None: derived from the object's seed, which is random unless given.
        tfs_z
            No effect: llama.cpp removed it.
        mirostat_mode, mirostat_tau, mirostat_eta
            Mirostat sampling: version (0: off), target entropy, learning rate.
        model : str or None
            The model's name in the response.
        stopping_criteria : callable or None
            Ends the completion when ``criteria(input_ids, logits)`` is true.
        logits_processor : callable or list of callable or None
            Changes the logits before each token, ``processor(input_ids, logits)``.
        grammar : LlamaGrammar or str or None
            Constrains the completion, see ``LlamaGrammar``.
        logit_bias : dict or None
            Values to add to the logits of tokens.
        **more
            llama.cpp's other samplers (XTC, DRY, top-n-sigma, dynamic temperature, adaptive-p) and their order, see
            ``SamplerOptions`` and ``SamplingParams``. All are off by default.
            ``min_tokens``: minimum tokens of the answer. ``stop_token_ids``: tokens that end
            the answer and are not part of it.

        Raises
        ------
        ValueError
            When the prompt is empty or does not fit the context (PromptTooLong).
        NotImplementedError
            For ``suffix``.

        Examples
        --------
        >>> done = llm.create_completion("It was the best of", max_tokens=2, temperature=0)
        >>> done["usage"]["completion_tokens"]
        2
        >>> chunks = llm.create_completion("It was", max_tokens=2, stream=True)
        >>> list(chunks)[-1]["choices"][0]["finish_reason"]
        'length'
        """
        given = flattened(locals(), "stream", "model", more_of=AnswerOptions)
        if are_prompts(prompt):
            if stream:
                raise ValueError("stream=True takes one prompt, not a list: use complete_many or AsyncLlama")
            return results.choices_of(self.complete_many(given.pop("prompt"), model=model, **given))
        chunks = results.stream(self.generation(**given), self._name if model is None else model)
        if stream:
            return self._steps(chunks)
        with self._source.turn():
            return results.collect(chunks, logprobs is not None)

    __call__ = create_completion

    def complete_many(
        self,
        prompts: Sequence[Prompt],
        progress: Callable[[int, int], None] | None = None,
        model: str | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Return the completion of each prompt, in order; see ``Llama.complete_many``."""
        found: list[Completion] = []
        for prompt in prompts:
            found.append(self.create_completion(prompt, model=model, **options))
            if progress is not None:
                progress(len(found), len(prompts))
        return found

    def generation(
        self,
        prompt: Prompt,
        post_sampling_probs: bool = False,
        n_keep: int | None = None,
        **options: Any,
    ) -> Generation:
        """Start a completion and return its generation; takes the options of ``create_completion``.

        With ``post_sampling_probs``, ``logprobs`` are those after all samplers, from which tokens were drawn. Where
        tokens may be evicted, the first ``n_keep`` tokens of the prompt stay, -1: all; BOS always stays. None:
        four.

        Examples
        --------
        >>> generation = llm.generation("It was the best of", max_tokens=2, temperature=0)
        >>> text = "".join(part for part, _ in generation.parts())
        >>> len(generation.tokens)
        2
        """
        given = completion_defaults() | options
        if given["suffix"] is not None:
            raise NotImplementedError(f"suffix: {INFILL}")
        model, source, n_top = self._model, self._source, given["logprobs"]
        params = sampling_params(given, self._seeds, self.last_n_tokens_size)
        held, tokens = constraint(given["grammar"]), prompt_tokens(source, prompt)
        sampler = Sampler(model, params, held, tokens)
        scorer = None if n_top is None else Scorer(model, check_count("logprobs", n_top, 0))
        cuts = halves(model, tokens, n_keep, source.n_ctx) if source.evicts else None
        text = prompt if isinstance(prompt, str) else ""
        fields = {"after_samplers": post_sampling_probs, "cuts": cuts, "text": text}
        return Generation(
            source,
            job_of(source, tokens, sampler, given, scorer is not None, **fields),
            StopFilter(stop_words(given["stop"]), strip_space=len(prompt) == 0),
            model.piece,
            scorer,
            prompt if isinstance(prompt, str) else model.detokenize(prompt).decode("utf-8", "ignore"),
            given["echo"],
            isinstance(prompt, str),
            params,
        )

    def _steps(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        while True:
            with self._source.turn():
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk


@cache
def completion_defaults() -> dict[str, Any]:
    """Return the defaults of ``create_completion``."""
    found = {name: one.default for name, one in signature(TextCompleter.create_completion).parameters.items()}
    others = ("self", "prompt", "stream", "model", "more")
    return {name: value for name, value in found.items() if name not in others}
