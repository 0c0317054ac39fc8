"""llama-server's routes for completions, its form of answers, and prompts of fill-in requests."""

import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from pylongctx.completions.results import Generation, TokenEntry
from pylongctx.engine.sampling.params import SAMPLERS, SamplingParams
from pylongctx.parallel import NEEDED, EngineSource, Host, MixedPrompt
from pylongctx.serve.bodies import NEVER, Chunk, InfillBody, NativeBody, as_prompts, read
from pylongctx.serve.errors import ApiError, invalid
from pylongctx.serve.handler import Chunks, Handler, Object
from pylongctx.serve.service import Service

# llama-server's names of sampler settings
NAMES = {
    "temp": "temperature",
    "penalty_last_n": "repeat_last_n",
    "typical_p": "typical_p",
    "mirostat_mode": "mirostat",
}
PROJECT = "myproject"  # llama-server's name of the repository in such prompts


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    api = APIRouter()

    @api.post("/completion", summary="Continue a text or several, in llama-server's form")
    @api.post("/completions", include_in_schema=False)
    async def complete(request: Request) -> Response:
        body = await read(request, NativeBody)
        prompts, single = as_prompts(body.prompt)
        return await NativeHandler(service, request, body, prompts, single).answer()

    @api.post("/infill", summary="Fill in the text between two texts, for models trained for it")
    async def infill(request: Request) -> Response:
        return await InfillHandler(service, request, await read(request, InfillBody)).answer()

    return api


class NativeHandler(Handler[NativeBody]):
    """Continues texts in the form of llama-server's own route; ``single`` requests have one prompt, not a list."""

    prefix = "cmpl-"

    def __init__(
        self, service: Service, request: Request, body: NativeBody, prompts: list[MixedPrompt], single: bool = True
    ) -> None:
        super().__init__(service, request, body, len(prompts) * (body.n or 1))
        self._prompts = prompts
        self._single = single and (body.n or 1) == 1
        self._sampling: Object = {}

    def prepare(self) -> None:
        """Compute the sampling arguments."""
        self._sampling = self.body.sampling(self.service.settings.sampling, self.host)

    def prompt(self, index: int) -> str | list[int]:
        """Return the prompt of a completion."""
        return self.host.plain(self._prompts[index // (self.body.n or 1)])

    def complete(self, index: int, source: EngineSource) -> Object:
        """Return the final object of a completion, with all of its text."""
        *parts, whole = self.stream(index, source)
        whole["content"] = "".join(part["content"] for part in parts)
        whole["tokens"] = [token for part in parts for token in part["tokens"]] if self.body.return_tokens else []
        if self.body.n_probs:
            found = [one for part in parts for one in part.get("completion_probabilities", ())]
            whole["completion_probabilities"] = found
        return whole

    def stream(self, index: int, source: EngineSource) -> Iterator[Object]:
        """Start a completion and return an iterator of its objects."""
        body = self.body
        if body.n_keep and not source.evicts:
            reason = (
                f"n_keep={body.n_keep} is not supported without eviction, start the server with --overflow evict_middle"
            )
            raise invalid(reason, "n_keep")
        generation = source.completer().generation(
            self.prompt(index),
            **self.seeded(self._sampling, index % (body.n or 1)),
            max_tokens=-1 if body.max_tokens is None else body.max_tokens,
            logprobs=body.n_probs or None,
            post_sampling_probs=body.post_sampling_probs,
            n_keep=body.n_keep,
        )
        return self._objects(generation)

    def _objects(self, generation: Generation) -> Iterator[Object]:
        """Yield the parts of a completion, and the final object."""
        body, n_sent, has_new_line, job = self.body, 0, False, generation.job
        to_object = sampled if body.post_sampling_probs else probabilities
        for text, entries in _parts(generation):
            has_new_line |= "\n" in text
            if text or n_sent < generation.n_tokens:
                part = _counts(generation) | {"content": text, "tokens": generation.tokens[n_sent:], "stop": False}
                n_sent = generation.n_tokens
                if entries:
                    part["completion_probabilities"] = [to_object(entry) for entry in entries]
                if body.timings_per_token:
                    part["timings"] = job.timings()
                yield part
        generation.finish()
        kind = "eos" if generation.ended else "word" if generation.word else "limit"
        params, n_held = generation.params, len(job.tokens) + generation.n_tokens - job.n_evicted
        assert params is not None
        given = {"n_predict": job.limit, "n_probs": body.n_probs or 0, "post_sampling_probs": body.post_sampling_probs}
        end: Object = {
            "content": "",
            "tokens": [],
            "stop": True,
            "model": self.service.settings.alias,
            "generation_settings": settings(params) | given,
            "prompt": self.host.model.detokenize(job.tokens.tolist(), True).decode("utf-8", "replace"),
            "has_new_line": has_new_line,
            "truncated": bool(job.dropped_tokens) or (kind == "limit" and n_held >= self.host.n_ctx),
            "stop_type": kind,
            "stopping_word": generation.word,
            "tokens_cached": n_held - (generation.n_tokens > 0),
            "timings": job.timings(),
        }
        yield _counts(generation) | end

    def whole(self, found: list[Object]) -> Any:
        """Return one object, or a list of them."""
        objects = [self._indexed(i, one) for i, one in enumerate(found)]
        return objects[0] if self._single else objects

    async def events(self, chunks: Chunks) -> AsyncIterator[Object | None]:
        """Yield the objects as they come."""
        async for index, chunk in chunks:
            if chunk is None:
                yield None
            elif "prompt_progress" in chunk:
                yield {"index": index, "content": "", "tokens": [], "stop": False, **chunk}
            else:
                yield self._indexed(index, chunk)

    def _indexed(self, index: int, one: Object) -> Object:
        one["index"] = index
        if one["stop"] and self.body.response_fields:
            return _chosen(one, self.body.response_fields)
        return one


class InfillHandler(NativeHandler):
    """Writes the text between two texts."""

    def __init__(self, service: Service, request: Request, body: InfillBody) -> None:
        super().__init__(service, request, body, [body.prompt])
        self._texts = body.input_prefix, body.input_suffix, body.prompt
        self._extra = body.input_extra
        self._tokens: list[int] = []

    def prepare(self) -> None:
        """Compute the sampling arguments and the prompt of all choices."""
        super().prepare()
        self._tokens = infill_prompt(self.host, *self._texts, self._extra, self.service.settings.spm_infill)

    def prompt(self, index: int) -> list[int]:
        """Return the prompt."""
        return self._tokens


def _parts(generation: Generation) -> Iterator[tuple[str, list[TokenEntry]]]:
    """Yield the parts with text, then the tokens without text, such as those of an incomplete character."""
    text, entries = "", list[TokenEntry]()
    for text, entries in generation.parts():
        if text:
            yield text, entries
    if not text:
        yield "", entries


def _counts(generation: Generation) -> Object:
    job = generation.job
    return {
        "index": 0,
        "id_slot": job.ran_on,
        "tokens_predicted": generation.n_tokens,
        "tokens_evaluated": len(job.tokens),
    }


def probabilities(entry: TokenEntry) -> Object:
    """Return llama-server's object of a token and the most likely ones."""
    own = _probability(entry.token, entry.piece, entry.logprob or 0.0)
    top = zip(entry.top_tokens, entry.top or (), strict=True)
    return own | {"top_logprobs": [_probability(token, *pair) for token, pair in top]}


def _probability(token: int, piece: bytes, logprob: float) -> Object:
    return {"id": token, "token": piece.decode("utf-8", "replace"), "bytes": list(piece), "logprob": logprob}


def sampled(entry: TokenEntry) -> Object:
    """Return the same with the probabilities after all samplers, without tokens that were removed."""
    own = probabilities(entry)
    return _with_prob(own) | {"top_probs": [_with_prob(one) for one in own["top_logprobs"] if one["logprob"] > NEVER]}


def _with_prob(one: Object) -> Object:
    kept = {name: value for name, value in one.items() if name not in ("logprob", "top_logprobs")}
    return kept | {"prob": min(1.0, math.exp(one["logprob"]))}


def settings(params: SamplingParams) -> Object:
    """Return the settings of a sampler under llama-server's names."""
    found = {NAMES.get(name, name): value for name, value in asdict(params).items() if name != "logit_bias"}
    bias = [{"token": token, "bias": value if value > NEVER else None} for token, value in params.logit_bias.items()]
    return found | {"logit_bias": bias, "samplers": list(SAMPLERS if params.samplers is None else params.samplers)}


def _chosen(one: Object, paths: list[str]) -> Object:
    """Return the values at paths of an object, such as ``generation_settings/n_predict``."""
    found = {}
    for path in paths:
        value: Any = one
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            found[path] = value
    return found


def infill_prompt(
    host: Host,
    prefix: str,
    suffix: str,
    begun: str = "",
    extra: Sequence[Chunk] | None = None,
    suffix_first: bool = False,  # as some models were trained
) -> list[int]:
    """Return the tokens of a prompt for the text between prefix and suffix, in llama-server's form.

    ``begun`` is the beginning of that text, and ``extra`` has pieces of other files. ApiError without fill-in tokens.
    """
    tokens = host.fill_tokens
    missing = [name for name in NEEDED if name not in tokens]
    if missing:
        reason = f"the model has no tokens {', '.join(missing)}: it was not trained to fill in"
        raise ApiError(501, "not_supported_error", reason)
    found = host.model.start
    if "fim_rep" in tokens:
        found += [tokens["fim_rep"], *host.tokens(f"{PROJECT}\n", False)]
    for chunk in extra or ():
        if "fim_sep" in tokens:
            found += [tokens["fim_sep"], *host.tokens(f"{chunk.filename}\n", False)]
        else:
            found += host.tokens("\n\n--- snippet ---\n\n", False)
        found += host.tokens(chunk.text, False)
    if "fim_sep" in tokens:
        found += [tokens["fim_sep"], *host.tokens("filename\n", False)]
    before = [tokens["fim_pre"], *host.tokens(prefix, False), *host.tokens(begun, False)]
    after = [tokens["fim_suf"], *host.tokens(suffix, False)]
    return [*found, *(after + before if suffix_first else before + after), tokens["fim_mid"]]
