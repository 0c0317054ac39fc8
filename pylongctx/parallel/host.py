"""The model of a server: several sequences in one context."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from pylongctx._arguments import has_gpu
from pylongctx._lib import lib
from pylongctx.chat.template import Templates
from pylongctx.engine.drafting import DraftModel
from pylongctx.engine.session import Session
from pylongctx.llama import Llama
from pylongctx.loading.opening import OpenedModel
from pylongctx.methods import Method
from pylongctx.store import KVStore
from pylongctx.store.library import StoredTexts

Prompt = str | list[int | str]  # a text, or tokens with texts between them

# fill-in-the-middle tokens: GGUF's names, and their texts in known vocabularies
FILL = {
    "fim_pre": ("prefix", ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "<|code_prefix|>", "[PREFIX]")),
    "fim_suf": ("suffix", ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "<|code_suffix|>", "[SUFFIX]")),
    "fim_mid": ("middle", ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "<|code_middle|>", "[MIDDLE]")),
    "fim_rep": ("", ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<reponame>")),
    "fim_sep": ("", ("<|file_sep|>", "<file_sep>")),
}
NEEDED = ("fim_pre", "fim_suf", "fim_mid")  # required to fill in


class Host:
    """A model whose context has ``n_seq`` sequences of ``n_ctx`` tokens each.

    Parameters
    ----------
    model_path : str
        GGUF file.
    n_seq : int
        Number of sequences.
    **arguments
        Arguments of ``Llama``, with its defaults.

    Attributes
    ----------
    name : str
        The model's name in answers.
    """

    def __init__(self, model_path: str, n_seq: int, **arguments: Any) -> None:
        if n_seq < 1:
            raise ValueError(f"a server needs at least 1 sequence, not {n_seq}: set -np")
        defaults = Llama.__init__.__kwdefaults__ or {}
        if unknown := arguments.keys() - defaults.keys():
            raise TypeError(f"Llama has no argument {', '.join(sorted(unknown))}")
        given = {**defaults, **arguments, "model_path": model_path}
        self._opened = OpenedModel(given, n_seq)
        self.n_seq = n_seq
        self.name = self.model_path = self._opened.path
        self.model = self._opened.model
        self.sessions = self._opened.sessions
        self.metadata = self.model.metadata()
        self.templates = Templates(self.model, given["chat_format"])
        self.seed: int = given["seed"]
        self.verbose = self._opened.verbose
        self.last_n_tokens_size: int = given["last_n_tokens_size"]
        self.draft_model: DraftModel | None = self._opened.draft_model
        if not self._opened.verbose:
            lib.lctx_log_set_level(0)  # llama.cpp logs disconnected clients as errors; other errors become exceptions

    @property
    def session(self) -> Session:
        """The first sequence."""
        return self.sessions[0]

    @property
    def method(self) -> Method | None:
        """The method with every automatic choice filled in; None with llama.cpp's own KV cache."""
        return self.session.method

    @property
    def n_ctx(self) -> int:
        """The context window of a sequence in tokens."""
        return self.session.n_ctx

    @property
    def identity(self) -> Mapping[str, Any]:
        """The identity of saved states, see ``OpenedModel.identity``."""
        return self._opened.identity

    @property
    def share_on_devices(self) -> float:
        """The fraction of layers on devices, including the output layer."""
        n_layers = self.model.info.n_layer + 1
        return min(self._opened.n_gpu_layers, n_layers) / n_layers if has_gpu() else 0.0

    @cached_property
    def fill_tokens(self) -> dict[str, int]:
        """The tokens of ``FILL`` that the model has."""
        found = {}
        for name, (old, texts) in FILL.items():
            keys = (f"tokenizer.ggml.{name}_token_id", f"tokenizer.ggml.{old}_token_id")
            known = next((int(self.metadata[key]) for key in keys if key in self.metadata), None)
            spelled = (self.model.tokenize(text.encode(), False, True) for text in texts)
            alone = (tokens[0] for tokens in spelled if len(tokens) == 1)
            token = known if known is not None else next(alone, None)
            if token is not None:
                found[name] = token
        return found

    def tokens(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a text after other tokens; PromptTooLong if it cannot fit with any tokenization."""
        self.session.check_size(len(text.encode()))
        return self.model.tokenize(text.encode(), False, special)

    def plain(self, prompt: Prompt) -> str | list[int]:
        """Return a prompt as a text or as tokens; a text at the beginning is preceded by the BOS token of the model."""
        if isinstance(prompt, str):
            return prompt
        found = self.model.start if prompt and isinstance(prompt[0], str) else []
        for part in prompt:
            found += self.tokens(part) if isinstance(part, str) else [part]
            if len(found) > self.n_ctx:
                raise self.session.too_long(len(found), "at least ")
        return found

    def biases(self, pairs: Iterable[tuple[int | str, float]]) -> dict[int, float]:
        """Return the bias of each token; the bias of a text applies to all its tokens."""
        found: dict[int, float] = {}
        for key, bias in pairs:
            found |= dict.fromkeys(self.tokens(key, False) if isinstance(key, str) else [key], bias)
        return found

    def kv_bytes(self) -> int:
        """Return the bytes of KV memory in use, 0 with llama.cpp's own cache, which does not report it."""
        return self.session.context.kv_usage().bytes if self.method else 0

    @property
    def store(self) -> KVStore | None:
        """The KV store, or None."""
        return self._opened.store

    @property
    def library(self) -> StoredTexts | None:
        """The store's interface for the engine, or None."""
        return self._opened.library

    def add_lora(self, path: str, scale: float = 1.0) -> None:
        """Use a LoRA adapter; must be called before the first request."""
        self._opened.adapters.add(self.session, path, scale)

    def close(self) -> None:
        """Free model and context."""
        self._opened.close()
