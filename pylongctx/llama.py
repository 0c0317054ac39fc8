"""The class Llama: llama_cpp.Llama's interface over a Completer and an engine with one slot."""

import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

from pylongctx import _arguments as arguments
from pylongctx import _log
from pylongctx.catalog.huggingface import from_pretrained
from pylongctx.chat.handlers import Handler
from pylongctx.completions.embeddings import CreateEmbeddingResponse, Embedder, Texts, Vectors
from pylongctx.drafts.mtp import MtpDraft
from pylongctx.engine.drafting import DraftModel
from pylongctx.loading.opening import AUTO, OpenedModel
from pylongctx.methods import Method
from pylongctx.reading import ReadingCompleter

DEFAULT_SEED = 0xFFFFFFFF


class Llama(ReadingCompleter):
    """A GGUF model and one context, with the interface of ``llama_cpp.Llama`` 0.3.36.

    Calls from several threads wait for each other; only ``abort`` returns at once. Between two chunks of a stream
    another call may run; the stream then raises RuntimeError. A forked child must open its own object.

    Parameters
    ----------
    model_path : str
        GGUF file; or, if there is no such file, a name of the catalogue that ``pylongctx get`` lists. A missing model
        of the catalogue is downloaded after a warning with its size and license.
    n_gpu_layers : int or "auto"
        How many of the last layers to place on devices, with their part of the KV cache; -1: all; "auto": as many as
        fit, of experts too.
    tensor_split : list of float or None
        Split between devices: first those of ``rpc_servers``, then the GPUs of this machine. None: by free memory.
    n_ctx : int
        Context window in tokens. 0 (the default here): the trained context, times 4 for a method that extends, or as
        much as memory allows, with a warning.
    n_batch, n_ubatch : int
        Maximum tokens of a batch, and of the graph that evaluates a part of it.
    n_threads, n_threads_batch : int or None
        Threads for generation (None: the physical cores available to this process) and for prefill (None: all
        CPUs).
    split_mode : int
        How the model is split across devices: 0 not, 1 by layers, 2 by rows, 3 by tensors.
    main_gpu : int
        The device of all layers, with ``split_mode=0``.
    vocab_only : bool
        Load only the vocabulary: the object can tokenize, but has no context.
    use_mmap : bool
        Memory-map the file. False: read the weights into the process's own memory, on huge pages where Linux has
        them, which makes generation up to 10 % faster and opening slower.
    use_mlock : bool
        Lock the model in memory.
    rope_scaling_type : int or None
        RoPE scaling: -1 the model's, 0 none, 1 linear, 2 YaRN.
    rope_freq_base, rope_freq_scale : float
        RoPE base frequency and frequency scale; 0: the model's.
    yarn_ext_factor : float
        YaRN's extrapolation mix factor; negative: the model's.
    yarn_attn_factor : float
        YaRN's attention magnitude factor.
    yarn_beta_fast : float
        YaRN's low correction dimension.
    yarn_beta_slow : float
        YaRN's high correction dimension.
    yarn_orig_ctx : int
        The trained context that YaRN extends; 0: the model's.
    pooling_type, attention_type : int
        Pooling of embeddings, and causal or non-causal attention; -1: the model's.
    offload_kqv : bool
        Keep K and V on the devices of their layers.
    op_offload : bool or None
        Offload operations on host tensors to devices. None: llama.cpp's default.
    swa_full : bool or None
        Keep every KV entry of sliding windows, so that rewinding needs no checkpoint. None: False with a method,
        llama.cpp's default without one.
    no_perf : bool
        Do not measure times inside llama.cpp.
    last_n_tokens_size : int
        Number of last generated tokens that penalties consider.
    kv_overrides : dict or None
        Values that override metadata of the file, by key: bool, int, float, or str of at most 127 bytes, of the same
        type as in the file. A key that llama.cpp does not read for this model is refused.
    override_tensor : dict or None
        Placement of tensors: buffer types, such as "CPU", by regular expressions searched in their names. The
        first match applies.
    lora_base, numa, tokenizer, spm_infill
        Only their defaults are supported: other values raise NotImplementedError with the reason.
    logits_all : bool
        Keep the logits of every token, see ``scores``.
    type_k, type_v : int or str or None
        ggml types of the KV cache, by number or name ("q8_0"). None: f16.
    embedding : bool
        Open for ``embed`` and ``create_embedding``, on llama.cpp's own KV cache; ``pooling_type`` -1 is the model's.
    lora_path : str or None
        A LoRA adapter, see ``add_lora``.
    lora_scale : float
        Its scale.
    chat_format : str or None
        A named format, a Jinja template, or ``chat_template.NAME`` of the model. None: the model's, else ChatML.
    chat_handler : callable or None
        Handles ``create_chat_completion`` instead, called like llama_cpp's handlers.
    draft_model : callable or None
        Drafts tokens, which are verified in one batch, see ``LlamaPromptLookupDecoding``. Not for eviction rules.
    draft : Method, MtpDraft, str or None
        The model drafts by itself. "mtp": with its MTP block (NextN), for methods without eviction rules; see
        ``MtpDraft``. "longheads": reading only the chunks that its heads select, and verifying the draft reading
        everything, for the methods full and dca; see ``SelfDraft``.
    seed : int
        Seed of the sampler; random by default.
    flash_attn : bool
        Accepted without effect: pylongctx's attention is always a flash attention.
    verbose : bool
        Log the chosen method settings and cache reuse (``logging.getLogger("pylongctx")``, to stderr if the program
        has no handlers), and let llama.cpp print its warnings.
    method : Method or str or None
        How a long context is processed: an object such as ``SelfExtend()``, or a string such as
        ``"selfextend,group_size=8"`` or ``"longheads+corm"``. None: llama.cpp's own KV cache. "auto", the default: full
        attention, on llama.cpp's own KV cache with one warning if no method supports the model. A method given by name
        raises an error for such a model.
    overflow : str
        How to handle a text that does not fit into the context. "error": raise PromptTooLong, and end an answer there.
        "evict_middle": evict the oldest turns after the system prompt of a conversation, before the answer and while
        it is generated, without evaluating anything again; see ``usage``. For full attention ("auto", "full").
    kv_limit : int or None
        Maximum bytes of KV memory, as in ``kv_usage().bytes``; beyond it ContextFull is raised and nothing changes.
    kv_store : str or None
        A folder that stores KV entries of prefilled texts, readable by its owner only. A prompt with a stored prefix,
        from this or an earlier process, continues after it; several processes may share the folder. A lost or damaged
        block is evaluated again. A folder that another user owns or may write to is refused. None: no store.
    kv_store_limit : int or None
        Maximum bytes of its files; the least recently used ones are removed. None: 20 GiB.
    kv_store_words : bool
        Store the first words of each text, for ``pylongctx kv ls``. The tokens are stored anyway.
    kv_offload : "host" or None
        "host": keep K and V in host memory and copy the chunks that heads select to the device, where they replace the
        least recently read ones. For longheads without an eviction rule.
    kv_offload_mib : int or None
        MiB on the devices for these chunks; None: twice what a query selects, and at least what one reads before
        selection begins. ``offload_usage()`` counts hits.
    rpc_servers : str or None
        "host:port,host:port" of machines that run ``pylongctx rpc-server``: their devices are used like local
        ones. A server that exits while in use ends this process, as in llama.cpp. For trusted networks only.
    progress_callback : callable or None
        Called as ``progress_callback(n_done, n_total)`` after each step of the prefill.
    n_parallel : int
        Sequences of ``n_ctx`` tokens each, on which ``complete_many`` and lists of prompts run concurrently.
    preflight : bool
        Check before any allocation that weights, K and V of ``n_ctx`` tokens and compute buffers fit into free
        memory. False: open it anyway, for shorter texts; KV memory is allocated as they grow.
    deterministic : bool
        A token has bitwise identical logits, no matter how its text was divided into batches, what is evaluated in the
        same batch, restored before it or drafted after it, with any number of threads, on one kind of CPU and one
        build. For methods without an eviction rule, on CPUs. It is slower.
    **kwargs
        Unknown arguments are ignored with a warning.

    Raises
    ------
    ValueError
        When the file, the method or a number is invalid.
    NotImplementedError
        When an argument requests an unsupported feature.
    MemoryError
        When model and context do not fit, with a table of the size of each part and suggestions.
    ConnectionError
        When a model of the catalogue is missing and cannot be downloaded.
    OSError
        When ``kv_store`` cannot be created; PermissionError when another user owns it or may write to it.

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
        n_gpu_layers: int | str = 0,
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
        draft: Method | MtpDraft | str | None = None,
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
        self.verbose, self.chat_format = verbose, chat_format
        self.n_parallel = arguments.check_count("n_parallel", n_parallel)
        opened = OpenedModel(given, self.n_parallel)
        self._finalizer = weakref.finalize(self, opened.close)
        try:
            super().__init__(opened)
            self._note(opened)
            if lora_path is not None:
                self.add_lora(lora_path, lora_scale)
        except BaseException:
            self.close()
            raise

    def _note(self, opened: OpenedModel) -> None:
        """Keep what llama_cpp.Llama shows as attributes."""
        self.model_path = opened.path
        self.n_threads, self.n_threads_batch = opened.threads
        self.n_batch: int = self._arguments["n_batch"] if opened.context is None else opened.context.n_batch
        self.metadata = opened.model.metadata()

    from_pretrained = classmethod(from_pretrained)

    # ---- lifetime ----

    def close(self) -> None:
        """Free model and context; waits for a running evaluation. The object cannot be used afterwards.

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
        """Use a LoRA adapter, or change the scale of one in use; all tokens are removed.

        Raises
        ------
        ValueError
            When the file is not an adapter of this model, or the scale is not from -10^4 to 10^4; then nothing changes.

        Examples
        --------
        >>> llm.add_lora("adapter.gguf", 0.5)  # doctest: +SKIP
        """
        self._opened.adapters.add(self.session, os.fspath(path), scale)
        self._solo.engine.documents.clear()

    def remove_lora(self, path: str | os.PathLike[str]) -> None:
        """Stop using an adapter; KeyError when it is not in use."""
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
            Cut a text after its first ``n_batch`` tokens, instead of refusing it.
        return_count : bool
            Return the number of tokens too.

        Returns
        -------
        list
            One list of floats per text, or without pooling per token; for a single text only its own.

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
        """Return the pooling type: 0 none, 1 mean, 2 cls, 3 last, 4 rank."""
        return self.session.context.pooling_type()

    @property
    def _embedder(self) -> Embedder:
        if not self._arguments["embedding"]:
            raise RuntimeError("Llama model must be created with embedding=True to call this method")
        return Embedder(self.session)
