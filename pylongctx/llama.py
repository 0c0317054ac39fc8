"""The class Llama: llama_cpp.Llama's interface, a facade of a Completer on an engine with one slot."""

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from pylongctx import _arguments as arguments
from pylongctx import _log
from pylongctx._tokenizer import LlamaTokenizer
from pylongctx.chat.handlers import Handler
from pylongctx.embeddings import CreateEmbeddingResponse, Embedder, Texts, Vectors
from pylongctx.engine.context import KVUsage, OffloadUsage
from pylongctx.engine.drafting import DraftModel
from pylongctx.engine.opening import AUTO, Opened
from pylongctx.hub import from_pretrained
from pylongctx.methods import Method
from pylongctx.reading import ReadingCompleter
from pylongctx.store import StoreUsage

DEFAULT_SEED = 0xFFFFFFFF


class Llama(ReadingCompleter):
    """A GGUF model and one context, with the interface of ``llama_cpp.Llama`` 0.3.36.

    Calls from several threads wait for each other; only ``abort`` comes through at once. Between two chunks of a stream
    another call may run, after which the stream raises RuntimeError. A forked child must open an object of its own.

    Parameters
    ----------
    model_path : str
        GGUF file; or, where no such file is, a name of the catalogue that ``pylongctx get`` lists. Such a model is
        fetched when it is not here yet, after a warning with its size and license.
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
    split_mode : int
        How the model is divided among devices: 0 not, 1 by layers, 2 by rows, 3 by tensors.
    main_gpu : int
        The device of all layers, with ``split_mode=0``.
    vocab_only : bool
        Load the vocabulary alone: the object tokenizes, and has no context.
    use_mmap : bool
        Map the file instead of reading it. False: the weights are the process's own, on huge pages where Linux has
        them, so that tokens are up to a tenth faster; opening takes longer.
    use_mlock : bool
        Keep the model in memory.
    rope_scaling_type : int or None
        RoPE scaling: -1 the model's, 0 none, 1 linear, 2 YaRN.
    rope_freq_base, rope_freq_scale : float
        Base of the frequencies, and by how much positions shrink; 0: the model's.
    yarn_ext_factor : float
        YaRN's share of extrapolation; negative: by the model.
    yarn_attn_factor : float
        YaRN's factor of attention.
    yarn_beta_fast : float
        YaRN's low correction dimension.
    yarn_beta_slow : float
        YaRN's high correction dimension.
    yarn_orig_ctx : int
        The trained length that YaRN stretches; 0: the model's.
    pooling_type, attention_type : int
        How vectors of tokens become one in embeddings, and causal or not; -1: the model's.
    offload_kqv : bool
        K and V lie on the devices of their layers.
    op_offload : bool or None
        Operations of the host go to devices. None: llama.cpp's default.
    swa_full : bool or None
        Sliding windows keep every row, so that going back needs no checkpoint. None: not with a method, as in llama.cpp
        without one.
    no_perf : bool
        Measure no times inside llama.cpp.
    last_n_tokens_size : int
        Generated tokens that penalties look back at.
    kv_overrides : dict or None
        Values in the place of the file's metadata, by key: bool, int, float, or str of at most 127 bytes, of the type
        that the file has. A key that llama.cpp does not read of this model is refused.
    override_tensor : dict or None
        Where tensors lie: buffer types, such as "CPU", by regular expressions that are searched in their names. The
        first that is found counts.
    lora_base, numa, tokenizer, spm_infill
        Only their defaults are supported: other values raise NotImplementedError with the reason.
    logits_all : bool
        Keep the logits of every token, see ``scores``.
    type_k, type_v : int or str or None
        ggml types of the KV cache, by number or name ("q8_0"). None: f16.
    embedding : bool
        Open for ``embed`` and ``create_embedding``, on llama.cpp's own memory; ``pooling_type`` -1 is the model's.
    lora_path : str or None
        A LoRA adapter, see ``add_lora``.
    lora_scale : float
        Its scale.
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
    overflow : str
        What happens with a text that does not fit into the context. "error": PromptTooLong, and an answer ends there.
        "evict_middle": the oldest turns of a conversation leave behind the system prompt, before its answer and while
        it is written, and nothing is evaluated again; ``usage`` says so. For full attention ("auto", "full").
    kv_limit : int or None
        Most bytes of KV memory, as ``kv_usage().bytes`` counts them; beyond, ContextFull is raised, nothing changed.
    kv_store : str or None
        A folder that keeps K and V of what was read, for its owner only. A prompt that begins as one before, in this
        process or an earlier one, goes on from there; several processes may share it. A block that is lost or damaged
        costs reading it again. A folder that another user owns or may write to is refused. None: nothing is kept.
    kv_store_limit : int or None
        Most bytes of its files; what was used least recently leaves. None: 20 GiB.
    kv_store_words : bool
        Whether its files have the first words of their texts, for ``pylongctx kv ls``. Their tokens are there anyway.
    kv_offload : "host" or None
        "host": K and V lie in memory of the host, the chunks that the heads choose are brought to the device, the least
        recently read ones making place. For longheads without an eviction rule.
    kv_offload_mib : int or None
        MiB of the devices for these chunks; None: twice what a query chooses, and at least what one reads before
        queries choose. ``offload_usage()`` counts hits.
    rpc_servers : str or None
        "host:port,host:port" of machines that run ``pylongctx rpc-server``: their devices are used as if they were
        here. A server that goes away while it is used ends this process, as in llama.cpp. For trusted networks only.
    progress_callback : callable or None
        Called as ``progress_callback(n_done, n_total)`` after each step of a prompt.
    n_parallel : int
        Sequences of ``n_ctx`` tokens each, on which ``complete_many`` and lists of prompts run together.
    preflight : bool
        Ask before anything is allocated whether weights, K and V of ``n_ctx`` tokens and compute buffers fit into free
        memory. False: open it all the same, for texts that are shorter; memory is taken as they grow.
    deterministic : bool
        A token has the same logits, bit for bit, however its text was divided into batches, whatever is evaluated
        beside it, restored before it or drafted behind it, with any number of threads, on one kind of CPU and one
        build. For methods without an eviction rule, on CPUs. It is slower.
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
    ConnectionError
        When a model of the catalogue is not here and cannot be fetched.
    OSError
        When ``kv_store`` cannot be made; PermissionError when another user owns it or may write to it.

    Examples
    --------
    >>> with Llama(path, method="longheads", n_ctx=4096, verbose=False) as reader:
    ...     answer = reader("It was the best of times, it was the worst of", max_tokens=2, temperature=0.0)
    >>> answer["object"], answer["usage"]["completion_tokens"]
    ('text_completion', 2)
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
        overflow: str = "error",
        kv_limit: int | None = None,
        kv_store: str | os.PathLike[str] | None = None,
        kv_store_limit: int | None = None,
        kv_store_words: bool = True,
        kv_offload: str | None = None,
        kv_offload_mib: int | None = None,
        rpc_servers: str | None = None,
        progress_callback: Callable[[int, int], None] | None = None,
        n_parallel: int = 1,
        preflight: bool = True,
        deterministic: bool = False,
        override_tensor: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        arguments.check_unknown(kwargs, list(given))
        if verbose:
            _log.show()
        self._arguments = given
        self.verbose = verbose
        self.chat_format = chat_format
        self.n_parallel = arguments.check_count("n_parallel", n_parallel)
        opened = self._opened = Opened(given, self.n_parallel)
        self.model_path = opened.path
        self._finalizer = weakref.finalize(self, opened.close)
        try:
            self.n_threads, self.n_threads_batch = opened.threads
            self.n_batch = n_batch if opened.context is None else opened.context.n_batch
            self.metadata = opened.model.metadata()
            super().__init__(opened)
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
            When the file is no adapter of this model, or the scale not from -10^4 to 10^4; nothing changed then.

        Examples
        --------
        >>> llm.add_lora("adapter.gguf", 0.5)  # doctest: +SKIP
        """
        self._opened.adapters.add(self.session, os.fspath(path), scale)
        self._solo.engine.documents.clear()

    def remove_lora(self, path: str | os.PathLike[str]) -> None:
        """Use an adapter no more; KeyError when it was not in use."""
        self._opened.adapters.remove(self.session, os.fspath(path))
        self._solo.engine.documents.clear()

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
        """Return how the rows of ``kv_offload="host"`` were read since the model was loaded."""
        return self.session.context.offload_usage()

    def kv_store_usage(self) -> StoreUsage:
        """Return what came from ``kv_store`` and went there since the model was loaded, a copy.

        Raises
        ------
        ValueError
            When there is no store.

        Examples
        --------
        >>> with Llama("model.gguf", n_ctx=1024, kv_store="kv", verbose=False) as reader:
        ...     answer = reader("a long text " * 150, max_tokens=1)
        ...     reader.kv_store_usage().hits
        0
        """
        if self._opened.store is None:
            raise ValueError("this Llama has no kv_store")
        return replace(self._opened.store.usage)

    def held_rows(self, layer: int, head: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return which tokens a KV head still holds, and what its queries think of them.

        Returns
        -------
        rows : numpy.ndarray
            int32 [n], positions, ascending.
        scores : numpy.ndarray
            int32 [n]: with corm the last query to which the token was important, -1 for none (CORM, definition 3.1; one
            of the last ``window`` when ``evict_every`` is not below it, where one is enough to stay);
            with scissorhands a count; with rules that weigh a float's bits (``scores.view(numpy.float32)``): the sum of
            all weights, with kvzip the largest.

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
