"""A conversation with a model: its messages and the KV cache that holds them."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from pylongctx._cache_folder import cache_folder
from pylongctx._units import bytes_text
from pylongctx.chat.loops import LOOP_TOKENS, is_loop, repeats
from pylongctx.errors import PromptTooLong
from pylongctx.methods import Method, Window

if TYPE_CHECKING:
    from pylongctx.engine.saved_state import LlamaState
    from pylongctx.llama import Llama


LOOP_CHECK_TOKENS = 16  # tokens between two checks for a loop
MESSAGES = "conversation"  # the key in a saved state's identity
KINDS = ("reasoning_content", "content")


@dataclass
class Turn:
    """The cost of an answer."""

    n_prompt: int = 0  # tokens evaluated before the answer
    n_answer: int = 0
    prompt_seconds: float = 0.0
    answer_seconds: float = 0.0
    n_turn: int = 0  # turns left out of the prompt because they did not fit
    n_gone: int = 0  # their tokens
    reason: str | None = None  # why the answer ended: stop, length, or None for Ctrl-C and errors
    looped: bool = False  # it was stopped because it repeated itself

    def count(self, usage: Mapping[str, Any]) -> None:
        """Copy the fields of the answer's usage."""
        dropped = usage.get("prompt_tokens_details", {})
        self.n_answer = usage["completion_tokens"]
        self.n_turn, self.n_gone = dropped.get("dropped_turns", 0), dropped.get("dropped_tokens", 0)

    def __str__(self) -> str:
        prompt = f"prompt {self.n_prompt} tokens{_rate(self.n_prompt, self.prompt_seconds)}"
        gone = f"; without the {self.n_turn} oldest turns, {self.n_gone} tokens" if self.n_gone else ""
        return f"{prompt}; {self.answer}{gone}"

    @property
    def prompt_speed(self) -> float:
        """Tokens of the prompt per second; 0 if there were none."""
        return self.n_prompt / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def answer(self) -> str:
        """The answer's length and speed."""
        return f"answer {self.n_answer} tokens{_rate(self.n_answer, self.answer_seconds)}"


def _rate(n: int, seconds: float) -> str:
    return f", {n / seconds:.1f} t/s" if n and seconds else ""


class Conversation:
    """Messages and the model that answers them.

    After an interruption the messages are those that were answered, partly or fully, and the next prompt
    continues from their cached prefix. ``arguments`` are those of create_chat_completion.
    """

    def __init__(self, llm: "Llama", system: str | None, arguments: dict[str, Any], stops_loops: bool = True) -> None:
        self.stops_loops = stops_loops
        self.llm = llm
        self.arguments = arguments
        self.turn = Turn()
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, Any]] = list(self._system)

    @property
    def used(self) -> str:
        """KV memory and context in use, as text."""
        llm = self.llm
        kv = "of llama.cpp" if llm.method is None else bytes_text(llm.kv_usage().bytes)
        return f"KV {kv}; context {llm.n_tokens}/{llm.n_ctx()}"

    @property
    def full(self) -> bool:
        """True if the context is full."""
        return self.llm.n_tokens + 1 >= self.llm.n_ctx()

    # ---- answers ----

    def ask(self, text: str, stop: Callable[[], bool]) -> Iterator[tuple[str, str]]:
        """Yield pairs of kind (``reasoning_content`` or ``content``) and text as they are generated.

        ``stop`` is called before each token. A message without any answer is not added to the conversation.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            yield from self._answer(stop)
        finally:
            if self.messages[-1]["role"] == "user":
                self.messages.pop()

    def ask_again(self, stop: Callable[[], bool]) -> Iterator[tuple[str, str]]:
        """Replace the last answer, see ``ask``; if no new text is generated, the old one stays."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise ValueError("there is no answer to replace")
        old = self.messages.pop()
        try:
            yield from self._answer(stop)
        finally:
            if self.messages[-1]["role"] == "user":
                self.messages.append(old)

    def _answer(self, stop: Callable[[], bool]) -> Iterator[tuple[str, str]]:
        turn = self.turn = Turn()
        session, start = self.llm.session, perf_counter()
        before = session.n_evaluated
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        first, stops_loops, repeating = 0, self.stops_loops, False
        held: list[tuple[str, str]] = []  # what repeats the text before it: not shown if it becomes a loop

        def look(ids: Any, logits: Any) -> bool:
            nonlocal start, first, repeating
            if not turn.prompt_seconds:  # prefill is done, this is the first token
                first = len(ids)
                turn.n_prompt, turn.prompt_seconds = session.n_evaluated - before, perf_counter() - start
                start = perf_counter()
            if stops_loops:
                answer = ids[max(first, len(ids) - LOOP_TOKENS) :].tolist()
                repeating = repeats(answer)
                turn.looped = repeating and (len(ids) - first) % LOOP_CHECK_TOKENS == 0 and is_loop(answer)
            return turn.looped or stop()

        try:
            if forgets(self.llm.method):
                self.read()
                self.llm.checkpoint()  # the next prompt may differ from here on, and not every cache can be rewound
            for chunk in self.llm.create_chat_completion(
                self.messages, stream=True, stopping_criteria=look, **self.arguments
            ):
                choice = chunk["choices"][0]
                held += [(kind, text) for kind in KINDS if (text := choice["delta"].get(kind))]
                if not repeating or (choice["finish_reason"] and not turn.looped):
                    for kind, text in held:
                        message[kind] = message.get(kind, "") + text
                        yield kind, text
                    held.clear()
                if "usage" in chunk and not stop():
                    turn.reason = choice["finish_reason"]
                if "usage" in chunk:
                    turn.count(chunk["usage"])
        finally:
            turn.answer_seconds = perf_counter() - start
            if turn.reason or any(map(message.get, KINDS)):
                self.messages.append(message)

    # ---- other conversations ----

    @property
    def system(self) -> str:
        """The system prompt; empty if there is none."""
        return str(self._system[0]["content"]) if self._system else ""

    def set_system(self, text: str) -> None:
        """Replace the system prompt; the next answer prefills the conversation again."""
        said = self.messages[len(self._system) :]
        self._system = [{"role": "system", "content": text}]
        self.messages = [*self._system, *said]

    def undo(self) -> None:
        """Remove the last message of the user and what followed; ValueError when there is none."""
        last = max((i for i, message in enumerate(self.messages) if message["role"] == "user"), default=None)
        if last is None:
            raise ValueError("there is nothing to undo")
        del self.messages[last:]

    def clear(self) -> None:
        """Remove all messages except the system prompt."""
        self.messages = list(self._system)
        self.llm.reset()

    def save(self, path: Path) -> None:
        """Write the messages and the KV cache to a file."""
        state = self.llm.save_state()
        replace(state, identity={**state.identity, MESSAGES: self.messages}).save(path)

    def load(self, path: Path) -> None:
        """Continue what ``save`` wrote; where that cannot be, nothing changes."""
        from pylongctx.engine.identity import difference
        from pylongctx.engine.saved_state import LlamaState

        state = LlamaState.load(path)
        identity = dict(state.identity)
        messages = identity.pop(MESSAGES, None)
        if messages is None:
            raise ValueError(f"{path} holds no conversation: only files written by /save can be loaded")
        if reason := difference(identity, self.llm.states.identity):
            raise ValueError(f"{path} cannot be continued here: {reason}")
        self.llm.session.check_room(state.n_tokens)
        self._continue(replace(state, identity=identity), messages)

    def _continue(self, state: "LlamaState", messages: list[dict[str, Any]]) -> None:
        self.llm.load_state(state)
        self.messages = messages

    def switch(self, llm: "Llama") -> None:
        """Continue with another model object, which prefills the conversation."""
        self.llm = llm
        if not any(message["role"] == "user" for message in self.messages):
            return
        try:
            self.read()
        except PromptTooLong:
            if not llm.session.evicts:  # else the next answer drops what does not fit
                raise

    def read(self) -> None:
        """Evaluate the messages after their cached prefix; when they do not fit, nothing changes."""
        self.llm.prefill(self.tokens())

    def tokens(self) -> list[int]:
        """Return the tokens of the conversation so far."""
        return self._tokens(self.messages, add_generation_prompt=False)

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of the prompt for a message."""
        return self._tokens([*self.messages, {"role": "user", "content": text}])

    def _tokens(self, messages: list[dict[str, Any]], **more: Any) -> list[int]:
        names = ("enable_thinking", "chat_template_kwargs", "parse_special")
        asked = {name: value for name, value in self.arguments.items() if name in names}
        return self.llm.chat_tokens(messages, **more, **asked)

    def count(self, text: str) -> int:
        """Return how many tokens a text has."""
        return len(self.llm.tokenize(text.encode(), add_bos=False))


def forgets(method: Method | None) -> bool:
    """Return True if the cache cannot be rewound because the method has evicted KV entries."""
    return method is not None and (
        method.eviction is not None or any(isinstance(part, Window) for part in method.parts)
    )


# ---- conversations on disk ----

FOLDER = "chats"  # in the cache folder
MAX_FILES = 100  # files to keep

Messages = list[dict[str, Any]]


class Autosave:
    """The file of one conversation: of one to continue, or a new one."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def save(self, messages: Sequence[dict[str, Any]]) -> None:
        """Write the messages to a file that only this user can read; OSError when that fails."""
        folder = cache_folder() / FOLDER
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._path is None:
            self._path = folder / f"{time.strftime('%Y-%m-%d %H.%M.%S')} {os.getpid()}.json"
        new = self._path.with_suffix(".new")
        with open(os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
            json.dump({"messages": list(messages)}, file, ensure_ascii=False)
        new.replace(self._path)
        for old in sorted(folder.glob("*.json"))[:-MAX_FILES]:
            old.unlink(missing_ok=True)


def latest() -> tuple[Path, Messages]:
    """Return the file of the most recent conversation, and its messages."""
    found = sorted((cache_folder() / FOLDER).glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError("there is no conversation to continue: chat saves one after its first answer")
    try:
        messages = json.loads(found[-1].read_text(encoding="utf-8"))["messages"]
        if not all(isinstance(one["role"], str) and isinstance(one["content"], str) for one in messages):
            raise TypeError
    except (ValueError, KeyError, TypeError) as reason:
        raise ValueError(f"the conversation in {found[-1]} is damaged; remove the file") from reason
    return found[-1], messages
