"""lm-evaluation-harness on pylongctx: the model "pylongctx".

``python -m pylongctx.lm_eval --model pylongctx --model_args model=FILE,method=longheads,n_ctx=8192 --tasks ...`` is
lm_eval's own command with this model registered. In a program, importing this module is enough.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from pylongctx import Llama
from pylongctx.completions.results import Scorer
from pylongctx.engine.prefix import longest_prefix

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import maybe_truncate, normalize_gen_kwargs
    from tqdm import tqdm
except ImportError as reason:
    raise ImportError(f"lm_eval needs lm-evaluation-harness: pip install 'pylongctx[lm-eval]' ({reason})") from reason

BATCHES = 8  # batches of requests to answer before lm_eval's cache is written

# (context, continuation) as texts, None for a window of a longer text; then as tokens
Pair = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("pylongctx")
class PylongctxLM(TemplateLM):  # type: ignore[misc]
    """A GGUF model with a method. Requests are sorted, so that a common prefix is evaluated once.

    Parameters
    ----------
    model : str
        GGUF file.
    max_gen_toks : int
        Maximum tokens to generate, unless the task sets it.
    add_bos_token : bool or None
        Whether a text begins with BOS; None: the model's setting.
    truncate : bool
        How to handle a request that does not fit into ``n_ctx``: cut its beginning with a warning, as
        lm_eval's own models do, or (the default) raise ValueError before anything is evaluated.
    batch_size : int or str or None
        How many requests of ``generate_until`` are answered concurrently, in sequences of ``n_ctx`` tokens; "auto"
        and None: one. Log-likelihoods are evaluated one after the other.
    max_batch_size, device
        Accepted without effect, since lm_eval always passes them.
    **arguments
        For ``Llama``: ``method``, ``n_ctx``, ``type_k``, ...

    Examples
    --------
    >>> model = PylongctxLM("model.gguf", method="longheads", n_ctx=2048)
    >>> model.max_length
    2048
    >>> model.llm.close()
    """

    def __init__(
        self,
        model: str,
        *,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        truncate: bool = False,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
        **arguments: Any,
    ) -> None:
        super().__init__()
        n_parallel = int(batch_size) if str(batch_size or "").isdecimal() else 1
        self.llm = Llama(model, **{"verbose": False, "seed": 1234, "n_parallel": n_parallel} | arguments)
        self.max_gen_toks = max_gen_toks
        self.add_bos_token = add_bos_token
        self.truncate = truncate
        self._scorer = Scorer(self.llm.session.model, 1)

    # ---- facts and texts ----

    @property
    def eot_token_id(self) -> int:
        """The end-of-sequence token."""
        return self.llm.token_eos()

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: BOS, or the end-of-sequence token of a model without BOS."""
        bos = self.llm.token_bos()
        return bos if bos >= 0 else self.eot_token_id

    @property
    def max_length(self) -> int:
        """The context window in tokens."""
        return self.llm.n_ctx()

    @property
    def tokenizer_name(self) -> str:
        """A name that distinguishes models in lm_eval's cache."""
        return Path(self.llm.model_path).name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text; None: begin with BOS according to ``add_bos_token``, unless it already does."""
        by_rule = add_special_tokens is None
        add_bos = self.add_bos_token is not False if by_rule else bool(add_special_tokens)
        tokens = self.llm.tokenize(string.encode(), add_bos, special=True)
        return tokens[1:] if by_rule and tokens[:2] == [self.llm.token_bos()] * 2 else tokens

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the prompt of a conversation; without a generation prompt the last message stays open."""
        prompt = self.llm.apply_template(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return prompt
        last = chat_history[-1]["content"].strip()
        return prompt[: prompt.rindex(last) + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the template's text, for lm_eval's records."""
        if isinstance(chat_template, str):
            raise ValueError(f"set the template in the model_args instead: chat_format=chat_template.{chat_template}")
        return str(self.llm.chat_template.info["source"])

    # ---- log-likelihoods ----

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return for each request the log-probability of its continuation, and whether greedy decoding generates it."""
        inputs = [self._fit(context, len(continuation) - 1) + continuation for _, context, continuation in requests]
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for i in tqdm(_sorted(inputs), desc="Running loglikelihood requests", disable=disable_tqdm):
            text, _, continuation = requests[i]
            found[i] = self._score(inputs[i], len(continuation))
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, found[i])
        return found

    def _score(self, tokens: list[int], n: int) -> tuple[float, bool]:
        """Return the sum of the log-probabilities of the last ``n`` tokens, and whether each is the most likely one."""
        total, is_greedy = 0.0, True
        for token, row in zip(tokens[len(tokens) - n :], self._rows(tokens[:-1], n), strict=True):
            entry = self._scorer.entry(token, row, 0)
            total += entry.logprob or 0.0
            is_greedy &= entry.top is not None and entry.logprob == entry.top[0][1]
        return total, is_greedy

    def _rows(self, tokens: list[int], n: int) -> Iterator[Any]:
        """Yield the logits after each of the last ``n`` tokens; the cached prefix is not evaluated again."""
        first = len(tokens) - n
        known = self.llm.n_tokens = longest_prefix(self.llm.session.tokens, tokens[:first])
        if known < first:
            self.llm.eval(tokens[known:first])
        for rows in self.llm.eval_rows(tokens[first:]):
            yield from rows

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text; longer ones are evaluated in windows, as in lm_eval."""
        found = []
        for (text,) in tqdm([request.args for request in requests], desc="Texts", disable=disable_tqdm):
            pairs = utils.get_rolling_token_windows(
                self.tok_encode(text, add_special_tokens=False), self.prefix_token_id, self.max_length, context_len=1
            )
            windows = [(None, *utils.make_disjoint_window(pair)) for pair in pairs]
            total = sum(value for value, _ in self._loglikelihood_tokens(windows, disable_tqdm=True))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            found.append(total)
        return found

    # ---- generation ----

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to a stop string."""
        asked = [self._asked(*request.args) for request in requests]
        found = [""] * len(requests)
        order = _sorted([one["prompt"] for one in asked])
        with tqdm(total=len(order), desc="Running generate_until requests", disable=disable_tqdm) as bar:
            for numbers in self._batches(order, asked):
                options = {name: value for name, value in asked[numbers[0]].items() if name != "prompt"}
                prompts = [asked[i]["prompt"] for i in numbers]
                answers = self.llm.complete_many(prompts, progress=lambda *counts: bar.update(), **options)
                for i, answer in zip(numbers, answers, strict=True):
                    found[i] = answer["choices"][0]["text"]
                    self.cache_hook.add_partial("generate_until", requests[i].args, found[i])
        return found

    def _batches(self, order: list[int], asked: list[dict[str, Any]]) -> Iterator[list[int]]:
        """Yield the indices of requests with equal options that are answered before the cache is written."""
        n = 1 if self.llm.n_parallel == 1 else BATCHES * self.llm.n_parallel
        for _, group in groupby(order, key=lambda i: repr(asked[i] | {"prompt": None})):
            numbers = list(group)
            yield from (numbers[i : i + n] for i in range(0, len(numbers), n))

    def _asked(self, context: str, gen_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of ``create_completion``; arguments unknown to lm_eval are passed through."""
        kwargs = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        stop, n, do_sample = (kwargs.pop(name) for name in ("until", "max_gen_toks", "do_sample"))
        kwargs.setdefault("temperature", 1.0 if do_sample else 0.0)
        return kwargs | {"prompt": self._fit(self.tok_encode(context), n), "stop": stop, "max_tokens": n}

    def _fit(self, context: list[int], n_more: int) -> list[int]:
        """Return the context, truncated to its end if it does not fit together with ``n_more`` tokens."""
        if len(context) + n_more <= self.max_length:
            return context
        if not self.truncate or n_more >= self.max_length:
            raise ValueError(
                f"a context of {len(context)} tokens and {n_more} more do not fit into n_ctx={self.max_length}: pass a "
                "larger n_ctx, a smaller max_gen_toks to generate less, or truncate=True to cut the beginning"
            )
        kept, _ = maybe_truncate(context, n_more, self.max_length)
        return list(kept)


def _sorted(texts: Sequence[list[int]]) -> list[int]:
    """Return the indices of the texts in an order in which neighbors share long prefixes."""
    return sorted(range(len(texts)), key=lambda i: texts[i])


def main() -> None:
    """Run lm_eval's command."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
