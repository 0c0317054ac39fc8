"""Methods of llama_cpp.Llama that come in a later release: each says so, and the way out."""

from typing import Any, NoReturn

CHAT = "format the prompt with the model's template and use create_completion"
EMBEDDINGS = "use llama_cpp.Llama(embedding=True)"
STATE = "evaluate the prompt again; a common prefix is reused within one object"


def _later(name: str, way_out: str) -> NoReturn:
    raise NotImplementedError(f"{name} comes in a later release of pylongctx; until then: {way_out}")


class Later:
    """What a program written for llama_cpp.Llama may call and this version does not have."""

    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        """Not in this version."""
        _later("create_chat_completion", CHAT)

    def create_chat_completion_openai_v1(self, *args: Any, **kwargs: Any) -> Any:
        """Not in this version."""
        _later("create_chat_completion_openai_v1", CHAT)

    def create_embedding(self, *args: Any, **kwargs: Any) -> Any:
        """Not in this version."""
        _later("create_embedding", EMBEDDINGS)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Not in this version."""
        _later("embed", EMBEDDINGS)

    def pooling_type(self) -> str:
        """Not in this version."""
        _later("pooling_type", EMBEDDINGS)

    def save_state(self) -> Any:
        """Not in this version."""
        _later("save_state", STATE)

    def load_state(self, state: Any) -> None:
        """Not in this version."""
        _later("load_state", STATE)

    def set_cache(self, cache: Any) -> None:
        """Not in this version."""
        _later("set_cache", STATE)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Not in this version."""
        _later("from_pretrained", "download the file with huggingface-cli and pass its path to Llama")
