"""The class Llama: llama_cpp.Llama's interface, a facade of a Completer on an engine with one slot."""

import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from pylongctx import _arguments as arguments
from pylongctx import _log
from pylongctx._tokenizer import LlamaTokenizer
from pylongctx.cache import BaseLlamaCache
from pylongctx.chat.template import Templates
from pylongctx.completer import Completer
from pylongctx.embeddings import CreateEmbeddingResponse, Embedder, Texts, Vectors
from pylongctx.engine.context import KVUsage, OffloadUsage
from pylongctx.engine.drafting import DraftModel, check_draft
from pylongctx.engine.job import Processors
from pylongctx.engine.opening import AUTO, Opened
from pylongctx.engine.session import Session, longest_prefix
from pylongctx.engine.solo import Solo
from pylongctx.engine.source import NoTokens, TokenSource
from pylongctx.engine.states import States
from pylongctx.grammar import constraint
from pylongctx.hub import from_pretrained
from pylongctx.inspect.recording import record
from pylongctx.inspect.trace import Trace
from pylongctx.methods import Method
from pylongctx.options import Grammar, Handler
from pylongctx.sampling import Sampler, StoppingCriteria, process
from pylongctx.state import LlamaState

DEFAULT_SEED = 0xFFFFFFFF
NO_CONTEXT = "this Llama was loaded with vocab_only=True: it has no context"


class Llama(Completer):
    """A GGUF model and one context, with the interface of ``llama_cpp.Llama`` 0.3.36.

    Calls from several threads wait for each other; only ``abort`` comes through at once. Between two chunks of a stream
    another call may run, after which the stream raises RuntimeError. A forked child must open an object of its own.

    Parameters
    ----------
    model_path : str
        GGUF file.
    n_gpu_layers : int
        How many of the last layers go to devices, with their part of the KV memory; -1: all.
    tensor_split : list of float or None
        Shares of the devices: those of ``rpc_servers``, then the GPUs of this machine. None: by free memory.
    n_ctx : int
        Context window in tokens. 0 (the default here): the trained context, times 4 for a method that extends, or as
        much as memory allows, with a warning.
    n_batch, n_ubatch : int
        Tokens of a batch, and of the graph that evaluates a part of it.
    n_threads, n_threads_batch : int or None
        Threads for one token (None: half of the CPUs that this process may use) and for a prompt (None: all of them).
    split_mode, main_gpu : int
        How the model is divided among devices (0 none, 1 layers, 2 rows, 3 tensors), and the device with 0.
    vocab_only : bool
        Load the vocabulary alone: the object tokenizes, and has no context.
    use_mmap, use_mlock : bool
        Map the file instead of reading it; keep it in memory.
    rope_scaling_type, rope_freq_base, rope_freq_scale : int and float
        RoPE scaling (-1: the model's, 0 none, 1 linear, 2 YaRN), base and scale of its frequencies; 0: the model's.
    yarn_ext_factor, yarn_attn_factor, yarn_beta_fast, yarn_beta_slow, yarn_orig_ctx
        YaRN's parameters, with llama.cpp's meaning and defaults.
    pooling_type, attention_type : int
        How vectors of tokens become one in embeddings, and causal or not; -1: the model's.
    offload_kqv, op_offload : bool or None
        K and V lie with their layers; host operations go to devices. None: llama.cpp's default.
    no_perf : bool
        Measure no times inside llama.cpp.
    last_n_tokens_size : int
        Generated tokens that penalties look back at.
    kv_overrides, swa_full, lora_base, numa, tokenizer, spm_infill
        Only their defaults are supported: other values raise NotImplementedError with the reason.
    logits_all : bool
        Keep the logits of every token, see ``scores``.
    type_k, type_v : int or str or None
        ggml types of the KV cache, by number or name ("q8_0"). None: f16.
    embedding : bool
        Open for ``embed`` and ``create_embedding``, on llama.cpp's own memory; ``pooling_type`` -1 is the model's.
    lora_path, lora_scale : str and float
        A LoRA adapter, see ``add_lora``.
    chat_format : str or None
        A named format, Jinja text, or ``chat_template.NAME`` of the model. None: the model's own template, else ChatML.
    chat_handler : callable or None
        Answers ``create_chat_completion`` instead, called as llama_cpp's handlers.
    draft_model : callable or None
        Guesses tokens, which are evaluated together, see ``LlamaPromptLookupDecoding``. Not with a rule that evicts.
    seed : int
        Seed of the sampler; unseeded runs are random.
    flash_attn : bool
        Accepted; the attention of pylongctx never holds a whole score matrix.
    verbose : bool
        Log the chosen method settings and cache reuse (``logging.getLogger("pylongctx")``, to stderr where the program
        has no handlers), and let llama.cpp print its warnings.
    method : Method or str or None
        How a long context is read: an object such as ``SelfExtend()``, or a string such as
        ``"selfextend,group_size=8"`` or ``"longheads+corm"``. None: llama.cpp's own KV cache. "auto", the default: full
        attention, on llama.cpp's own KV cache with one warning where no method serves the model. A method that is named
        raises there.
    kv_limit : int or None
        Most bytes of KV memory, as ``kv_usage().bytes`` counts them; beyond, ContextFull is raised, nothing changed.
    kv_offload : "host" or None
        "host": K and V lie in memory of the host, the pages that the heads choose are brought to the device, the least
        recently read ones making place. For longheads without an eviction rule.
    kv_offload_mib : int or None
        MiB of the devices for these pages; None: twice what a token reads. ``offload_usage()`` tells how it goes.
    rpc_servers : str or None
        "host:port,host:port" of machines that run ``pylongctx rpc-server``: their devices are used as if they were
        here. A server that goes away while it is used ends this process, as in llama.cpp. For trusted networks only.
    progress_callback : callable or None
        Called as ``progress_callback(n_done, n_total)`` after each step of a prompt.
    preflight : bool
        Ask before anything is allocated whether weights, K and V of ``n_ctx`` tokens and compute buffers fit into free
        memory. False: open it all the same, for texts that are shorter; memory is taken as they grow.
    **kwargs
        Unknown names are ignored with a warning.

    Raises
    ------
    ValueError
        When the file, the method or a number is not usable.
    NotImplementedError
        When an argument asks for what this version does not have.
    MemoryError
        When model and context do not fit, with a table of what each part takes and ways out.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> with Llama("model.gguf", method="longheads", n_ctx=4096, verbose=False) as other:
    ...     answer = other(open("book.txt").read() + "It was the best of", max_tokens=2)
    ...     other.method.window
    256
    """

    def __init__(
        self,
        model_path: str,
        *,
        n_gpu_layers: int = 0,
        split_mode: int = 1,
        main_gpu: int = 0,
        tensor_split: list[float] | None = None,
        vocab_only: bool = False,
        use_mmap: bool = True,
        use_mlock: bool = False,
        kv_overrides: dict[str, bool | int | float | str] | None = None,
        seed: int = DEFAULT_SEED,
        n_ctx: int = 0,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        rope_scaling_type: int | None = -1,
        pooling_type: int = -1,
        attention_type: int = -1,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        yarn_ext_factor: float = -1.0,
        yarn_attn_factor: float = 1.0,
        yarn_beta_fast: float = 32.0,
        yarn_beta_slow: float = 1.0,
        yarn_orig_ctx: int = 0,
        logits_all: bool = False,
        embedding: bool = False,
        offload_kqv: bool = True,
        flash_attn: bool = False,
        op_offload: bool | None = None,
        swa_full: bool | None = None,
        no_perf: bool = False,
        last_n_tokens_size: int = 64,
        lora_base: str | None = None,
        lora_scale: float = 1.0,
        lora_path: str | None = None,
        numa: bool | int = False,
        chat_format: str | None = None,
        chat_handler: Handler | None = None,
        draft_model: DraftModel | None = None,
        tokenizer: object | None = None,
        type_k: int | str | None = None,
        type_v: int | str | None = None,
        spm_infill: bool = False,
        verbose: bool = True,
        method: Method | str | None = AUTO,
        kv_limit: int | None = None,
        kv_offload: str | None = None,
        kv_offload_mib: int | None = None,
        rpc_servers: str | None = None,
        progress_callback: Callable[[int, int], None] | None = None,
        preflight: bool = True,
        **kwargs: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        arguments.check_unknown(kwargs, list(given))
        if verbose:
            _log.show()
        self._arguments = given
        self.model_path = str(model_path)
        self.verbose = verbose
        self.chat_format = chat_format
        opened = self._opened = Opened(given)
        self._finalizer = weakref.finalize(self, opened.close)
        try:
            self.n_threads, self.n_threads_batch = opened.threads
            self.n_batch = n_batch if opened.context is None else opened.context.n_batch
            self.metadata = opened.model.metadata()
            super().__init__(
                opened.model,
                _source(opened),
                self.model_path,
                Templates(opened.model, chat_format),
                seed,
                last_n_tokens_size,
                chat_handler,
            )
            if lora_path is not None:
                self.add_lora(lora_path, lora_scale)
        except BaseException:
            self.close()
            raise

    from_pretrained = classmethod(from_pretrained)

    # ---- life ----

    def close(self) -> None:
        """Free model and context; waits for a running evaluation. The object is of no use afterwards.

        Examples
        --------
        >>> with Llama(path, verbose=False) as other:  # closes it at the end
        ...     n = other.n_vocab()
        """
        self._finalizer()

    def __enter__(self) -> "Llama":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self._arguments

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # ---- the sequence ----

    @property
    def session(self) -> Session:
        """The sequence: its tokens and logits, going back, evaluating, facts of the model.

        Raises
        ------
        RuntimeError
            When the object is closed, or was loaded with ``vocab_only``.
        """
        return self._solo.session

    @property
    def states(self) -> States:
        """The states that the sequence can continue from: the checkpoint, the cache, what they depend on."""
        return self._solo.states

    @property
    def _solo(self) -> Solo:
        self._model.handle  # noqa: B018 - raises when closed
        if not isinstance(self._source, Solo):
            raise RuntimeError(NO_CONTEXT)
        return self._source

    @property
    def n_tokens(self) -> int:
        """The number of evaluated tokens; setting a smaller number forgets the tokens after it."""
        return self.session.n_tokens

    @n_tokens.setter
    def n_tokens(self, n: int) -> None:
        if not 0 <= n <= self.session.n_tokens:
            raise ValueError(f"n_tokens can only go back: 0 to {self.session.n_tokens}, not {n}")
        self.session.n_tokens = n

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """int32 [n_ctx]; the first ``n_tokens`` are the evaluated tokens."""
        return self.session.input_ids

    @property
    def _input_ids(self) -> NDArray[np.int32]:  # llama_cpp's
        return self.session.tokens

    @property
    def scores(self) -> NDArray[np.float32]:
        """Logits, float32 [n_tokens, n_vocab] with logits_all, else only the last row, [1, n_vocab].

        The array is a view that later evaluations may overwrite; it has no rows before the first evaluation.
        """
        return self.session.scores

    _scores = scores

    @property
    def eval_tokens(self) -> deque[int]:
        """The evaluated tokens."""
        return deque(self._input_ids.tolist(), maxlen=self.n_ctx())

    @property
    def eval_logits(self) -> deque[list[float]]:
        """The rows of ``scores`` as lists."""
        return deque(self.scores.tolist(), maxlen=self.n_ctx() if self.session.logits_all else 1)

    def reset(self) -> None:
        """Forget all tokens.

        Examples
        --------
        >>> llm.reset()
        >>> llm.n_tokens
        0
        """
        with self.session.lock:
            self.session.clear()

    def abort(self) -> None:
        """Stop the evaluation that another thread runs; it raises Aborted and the object stays usable.

        Examples
        --------
        >>> from threading import Timer
        >>> Timer(60, llm.abort).cancel()  # without cancel(): stops what runs after a minute
        """
        self.session.context.abort = True

    # ---- evaluation ----

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the current ones.

        Raises
        ------
        ValueError
            When a token is outside the vocabulary, or the tokens do not fit (ContextFull).
        Aborted
            When ``abort`` was called meanwhile.

        Examples
        --------
        >>> llm.reset()
        >>> llm.eval([1, 7, 9])
        >>> llm.n_tokens, llm.scores.shape == (1, llm.n_vocab())
        (3, True)
        """
        ids = self._model.check_tokens(tokens)
        with self.session.lock:
            self.session.context.abort = False
            self.session.eval(ids)

    def eval_rows(self, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Evaluate tokens and yield their logits, float32 [k, n_vocab] per step of at most n_ubatch tokens.

        Memory does not grow with the tokens. An array is valid until the next step.

        Examples
        --------
        >>> llm.reset()
        >>> sum(len(rows) for rows in llm.eval_rows([1, 7, 9]))
        3
        """
        ids = self._model.check_tokens(tokens)
        self.session.context.abort = False
        return self.session.eval_rows(ids)

    def trace(self, start: int | None = None, stop: int | None = None) -> AbstractContextManager[Trace]:
        """Record which chunks each layer and head reads: ``with llm.trace() as trace: llm.eval(tokens)``.

        The results do not change. Numbers and a map come from ``pylongctx.inspect``. A position that is evaluated again
        replaces its record.

        Parameters
        ----------
        start, stop : int or None
            Record the queries at positions ``start <= p < stop`` of the text. None: the current number of tokens,
            and n_ctx. A query takes 4 * n_layer * n_head * window / chunk_size bytes.

        Raises
        ------
        ValueError
            When the method reads no chunks, or the range is empty or outside of the context.
        RuntimeError
            When a trace is being recorded already.
        MemoryError
            When the records of the range do not fit into memory.

        Examples
        --------
        >>> llm.reset()
        >>> with llm.trace(stop=64) as trace:
        ...     llm.eval(tokens[:64])
        >>> len(trace.positions)
        64
        """
        return record(self.session, start, stop)

    @staticmethod
    def longest_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
        """Return how many leading tokens are equal.

        Examples
        --------
        >>> Llama.longest_token_prefix([1, 7, 9], [1, 7, 8, 9])
        2
        """
        return longest_prefix(a, b)

    @staticmethod
    def logits_to_logprobs(logits: NDArray[np.float32] | list[float], axis: int = -1) -> NDArray[np.float32]:
        """Return the log-softmax along ``axis``, float32 of the same shape; rows may hold -inf.

        Examples
        --------
        >>> round(float(Llama.logits_to_logprobs([0.0, 0.0])[0]), 4)  # log(1/2)
        -0.6931
        """
        x = np.asarray(logits, np.float32)
        top = np.max(x, axis=axis, keepdims=True)
        shifted = x - np.where(np.isfinite(top), top, np.float32(0))
        with np.errstate(divide="ignore"):
            return np.asarray(shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True)), np.float32)

    # ---- tokens ----

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
        sampler, session = Sampler(self._model, self._sampling(locals()), constraint(grammar)), self.session
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
        stopping_criteria: StoppingCriteria | None = None,
        grammar: Grammar | None = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yield tokens that continue ``tokens``, without end; ``.send(tokens)`` injects tokens after the last one.

        With ``reset``, ``tokens`` are the whole sequence and what the cache holds of their beginning is reused;
        without, they follow the current tokens. The other parameters are those of ``create_completion``.

        Examples
        --------
        >>> for token in llm.generate(llm.tokenize(b"It was"), temp=0):
        ...     if token == llm.token_eos() or llm.n_tokens > 8:
        ...         break
        """
        sampler = Sampler(self._model, self._sampling(locals()), constraint(grammar))
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
        """What guesses the next tokens; another one is used from the next generation on."""
        return self._solo.draft_model

    @draft_model.setter
    def draft_model(self, model: DraftModel | None) -> None:
        check_draft(model, self.method)
        self._solo.draft_model = model

    # ---- states ----

    def save_state(self) -> LlamaState:
        """Return tokens, last logits and KV rows; the sampler and the earlier ``scores`` are no part of it.

        Examples
        --------
        >>> llm.eval([1, 7, 9])
        >>> state = llm.save_state()
        >>> llm.reset()
        >>> llm.load_state(state)
        >>> llm.n_tokens
        3
        """
        return self.states.save()

    def load_state(self, state: LlamaState) -> None:
        """Continue from a saved state; with logits_all the earlier rows of ``scores`` are NaN.

        Raises
        ------
        InvalidInput
            When another model, method or setting made it, or it is damaged. The object is empty then, and usable.
        """
        self.states.load(state)

    def checkpoint(self) -> LlamaState:
        """Return a snapshot in memory and keep it: a prompt that begins with its tokens continues from there.

        It is for methods that cannot go back, such as corm, which evicts: take it where the next prompt may differ,
        as after the prompt of a chat turn. It takes as many bytes as the KV cache holds; the next one replaces it.

        Examples
        --------
        >>> llm.reset()
        >>> llm.eval([1, 7])
        >>> llm.checkpoint().n_tokens
        2
        >>> llm.eval([9])
        >>> llm.restore()
        >>> llm.n_tokens
        2
        """
        return self.states.take_checkpoint()

    def restore(self, state: LlamaState | None = None) -> None:
        """Go back to ``state``, or to the last checkpoint.

        Raises
        ------
        RuntimeError
            When there is no checkpoint.
        InvalidInput
            When the state belongs to another model, method or setting, see ``load_state``.
        """
        state = state or self.states.checkpoint
        if state is None:
            raise RuntimeError("there is no checkpoint: call checkpoint() first")
        self.load_state(state)

    @property
    def cache(self) -> BaseLlamaCache | None:
        """The cache of states that completions start from, see ``set_cache``."""
        return self.states.cache

    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """Let completions start from the states of a cache, and add theirs to it; None: no cache.

        Examples
        --------
        >>> from pylongctx import LlamaRAMCache
        >>> llm.set_cache(LlamaRAMCache(capacity_bytes=2**28))
        >>> llm.set_cache(None)
        """
        self.states.cache = cache

    # ---- adapters ----

    @property
    def loras(self) -> Mapping[str, float]:
        """The LoRA adapters in use: path and scale."""
        return self._opened.adapters.scales

    def add_lora(self, path: str | os.PathLike[str], scale: float = 1.0) -> None:
        """Use a LoRA adapter, or give one that is in use another scale; the tokens so far are forgotten.

        Raises
        ------
        ValueError
            When the file is no adapter of this model, or the scale not finite; nothing changed then.

        Examples
        --------
        >>> llm.add_lora("adapter.gguf", 0.5)  # doctest: +SKIP
        """
        self._opened.adapters.add(self.session, os.fspath(path), scale)

    def remove_lora(self, path: str | os.PathLike[str]) -> None:
        """Use an adapter no more; KeyError when it was not in use."""
        self._opened.adapters.remove(self.session, os.fspath(path))

    # ---- embeddings ----

    def create_embedding(self, input: Texts, model: str | None = None) -> CreateEmbeddingResponse:
        """Embed texts, or their tokens; returns OpenAI's response dict.

        Examples
        --------
        >>> with Llama(path, embedding=True, pooling_type=1, verbose=False) as embedder:
        ...     len(embedder.create_embedding(["a", "b"])["data"])
        2
        """
        return self._embedder.response(input, self.model_path if model is None else model)

    @overload
    def embed(
        self, input: Texts, normalize: bool = False, truncate: bool = True, return_count: Literal[False] = False
    ) -> Vectors: ...
    @overload
    def embed(
        self, input: Texts, normalize: bool = False, truncate: bool = True, *, return_count: Literal[True]
    ) -> tuple[Vectors, int]: ...

    def embed(
        self, input: Texts, normalize: bool = False, truncate: bool = True, return_count: bool = False
    ) -> Vectors | tuple[Vectors, int]:
        """Embed a text or several, each a string or its tokens.

        Parameters
        ----------
        normalize : bool
            Scale every vector to length 1.
        truncate : bool
            Leave out what is behind the first ``n_batch`` tokens of a text, instead of refusing it.
        return_count : bool
            Return the number of tokens too.

        Returns
        -------
        list
            One list of floats per text, or per token of a text without pooling; for a single text, its own.

        Raises
        ------
        RuntimeError
            When the object was not opened with ``embedding=True``.
        ValueError
            When a text has no tokens, or too many.

        Examples
        --------
        >>> with Llama(path, embedding=True, pooling_type=1, verbose=False) as embedder:
        ...     len(embedder.embed("the thief")) == embedder.n_embd()
        True
        """
        vectors, n_tokens = self._embedder.embed(input, normalize, truncate)
        return (vectors, n_tokens) if return_count else vectors

    def pooling_type(self) -> int:
        """Return how vectors of tokens become one: 0 not, 1 mean, 2 cls, 3 last, 4 rank."""
        return self.session.context.pooling_type()

    @property
    def _embedder(self) -> Embedder:
        if not self._arguments["embedding"]:
            raise RuntimeError("Llama model must be created with embedding=True to call this method")
        return Embedder(self.session)

    # ---- facts ----

    @property
    def method(self) -> Method | None:
        """The method with every automatic choice filled in; None with llama.cpp's own KV cache."""
        return self.session.method

    def kv_usage(self) -> KVUsage:
        """Return the KV memory: ``bytes``, ``peak_bytes``, ``full_bytes``, ``rows`` int32 [n_layer, n_head_kv].

        Examples
        --------
        >>> llm.reset()
        >>> llm.eval(tokens[:64])
        >>> usage = llm.kv_usage()
        >>> usage.bytes <= usage.peak_bytes, int(usage.rows.min())
        (True, 64)
        """
        return self.session.context.kv_usage()

    def offload_usage(self) -> OffloadUsage:
        """Return how the pages of ``kv_offload="host"`` were read since the model was loaded."""
        return self.session.context.offload_usage()

    def held_rows(self, layer: int, head: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return which tokens a KV head still holds, and what its queries think of them.

        Returns
        -------
        rows : numpy.ndarray
            int32 [n], positions, ascending.
        scores : numpy.ndarray
            int32 [n]: with corm the last query to which the token was important, -1 for none (CORM, definition 3.1; one
            of the last ``window`` when ``evict_every`` is not below it, where one is enough to stay);
            with scissorhands a count; with h2o and tova a float's bits (``scores.view(numpy.float32)``).

        Raises
        ------
        IndexError
            When the model has no such layer or head.
        """
        shape = self.kv_usage().rows.shape
        if not (0 <= layer < shape[0] and 0 <= head < shape[1]):
            raise IndexError(f"the model has {shape[0]} layers of at most {shape[1]} KV heads, not ({layer}, {head})")
        return self.session.context.held_rows(layer, head)

    def n_ctx(self) -> int:
        """Return the context window in tokens.

        Examples
        --------
        >>> llm.n_ctx()
        2048
        """
        return self.session.context.n_ctx

    def n_embd(self) -> int:
        """Return the width of the model."""
        return int(self._model.info.n_embd)

    def n_vocab(self) -> int:
        """Return the size of the vocabulary."""
        return int(self._model.info.n_vocab)

    def token_bos(self) -> int:
        """Return the beginning-of-sequence token, -1 for none."""
        return int(self._model.info.token_bos)

    def token_eos(self) -> int:
        """Return the end-of-sequence token, -1 for none."""
        return int(self._model.info.token_eos)

    def token_nl(self) -> int:
        """Return the newline token, -1 for none."""
        return int(self._model.info.token_nl)

    # ---- vocabulary ----

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Return the token ids of UTF-8 bytes; ``special`` reads the texts of special tokens as such.

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


def _source(opened: Opened) -> TokenSource:
    """Return what makes the tokens of a Llama."""
    if not opened.sessions:
        return NoTokens(opened.model, NO_CONTEXT)
    (session,) = opened.sessions
    return Solo(session, States(session, lambda: opened.identity), opened.given["draft_model"])
