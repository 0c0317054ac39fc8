"""Options of generation: sampling, chat templates and drafts."""

import argparse
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pylongctx.cli.arguments import PREFIX, Options, file_text, integer, json_object, layers, number, on_off_auto, one
from pylongctx.cli.get import fetched
from pylongctx.engine.sampling.params import KEYWORDS, NUMBERS, Number, sampler_names

if TYPE_CHECKING:
    from pylongctx.completions.grammar import LlamaGrammar
    from pylongctx.drafts.speculative import LlamaDraftModel


ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
ESCAPE = re.compile(r"""\\([nrt'"\\]|x([0-9A-Fa-f]{2}))""")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the sampling options and the limits of an answer, see ``sampling_arguments``."""
    options = Options(parser, "sampling")
    add = options.add
    help = "maximum tokens of an answer (-1: no limit)"
    add("-n", "--predict", "--n-predict", parse=_predict, env="LLAMA_ARG_N_PREDICT", help=help)
    add("-s", "--seed", parse=integer, help="seed (random)")
    for parameter in NUMBERS:
        if parameter.options:
            parse, env = integer if parameter.kind is int else number, parameter.env and PREFIX + parameter.env
            add(*parameter.options, parse=parse, env=env, help=parameter.help)
    add("--samplers", parse=_names, metavar="NAMES", help="samplers to run, such as top_k;temperature (all)")
    names = ("--sampler-seq", "--sampling-seq")
    add(*names, parse=_letters, metavar="LETTERS", help="samplers by llama.cpp's letters, such as kt")
    help = "DRY: text that ends a repetition; none: no text does"
    options.several("--dry-sequence-breaker", metavar="TEXT", help=help)
    help = "add a bias to the logit of a token, such as 15043+1 or 15043-1"
    options.several("-l", "--logit-bias", parse=_bias, metavar="TOKEN+BIAS", help=help)
    options.several("-r", "--reverse-prompt", metavar="TEXT", help="stop the answer before this text")
    add("--grammar", metavar="GBNF", help="grammar that constrains the answer")
    add("--grammar-file", parse=file_text, metavar="FILE", help="grammar, from a file")
    add("-j", "--json-schema", metavar="SCHEMA", help="JSON schema that constrains the answer; {} is any object")
    add("-jf", "--json-schema-file", parse=file_text, metavar="FILE", help="JSON schema, from a file")


def add_text_options(parser: argparse.ArgumentParser, title: str) -> None:
    """Add the initial text, see ``given_text``."""
    options = Options(parser, title)
    options.add("-p", "--prompt", metavar="TEXT", help="initial text")
    options.add("-f", "--file", parse=file_text, metavar="FILE", help="initial text from a file, without escapes")
    options.switch("-e", "--escape", off=True, help="process escapes such as \\n in options (on)")


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Add the detection of loops and the rendering of answers."""
    options = Options(parser, "answer")
    options.switch("--loop-stop", off=True, help="stop an answer that repeats itself (on)")
    options.switch("--markdown", off=True, help="render Markdown in a terminal (on)")


def given_text(args: argparse.Namespace, option: str, file_option: str) -> str | None:
    """Return the text of an option or of a file; None when neither is given."""
    text: str | None = one(args, option, file_option)
    if text is None or getattr(args, option) is None:
        return text
    if not text.isascii() and any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        raise ValueError(f"--{option.replace('_', '-')} is not UTF-8: use a file")
    return unescaped(args, text)


def unescaped(args: argparse.Namespace, text: str) -> str:
    """Return a text of the command line with its escapes processed, unless --no-escape is given."""
    if getattr(args, "escape", None) is False:
        return text
    return ESCAPE.sub(lambda found: chr(int(found[2], 16)) if found[2] else ESCAPES[found[1]], text)


def add_template_options(parser: argparse.ArgumentParser) -> None:
    """Add the chat template options, see ``template_arguments``."""
    options = Options(parser, "conversation")
    add = options.add
    add("--chat-template", metavar="NAME|JINJA", env=True, help="named chat format, or a Jinja template")
    add("--chat-template-file", parse=file_text, metavar="FILE", env=True, help="file with a Jinja template")
    help = "JSON object of variables for the template"
    add("--chat-template-kwargs", parse=json_object, metavar="JSON", env=True, help=help)
    options.switch("--jinja", off=True, env=True, help="accepted for compatibility: templates are always Jinja")
    options.switch("--parse-special", help="parse special tokens in user and tool messages, as llama.cpp does")
    help = "let reasoning models reason (auto: yes)"
    options.add("-rea", "--reasoning", parse=on_off_auto, metavar="on|off|auto", env=True, help=help)
    help = "reasoning effort, for templates that support it: low, medium, high (theirs)"
    add("--reasoning-effort", metavar="LEVEL", env=True, help=help)


def _predict(text: str) -> int:
    n = integer(text)
    if n < 1 and n not in (-1, -2):
        raise ValueError(f"must be at least 1, or -1 for no limit, not {n}")
    return n


def _dest(parameter: Number) -> str:
    """Return where argparse stores the option of a sampling parameter."""
    return parameter.options[0].removeprefix("--").replace("-", "_")


def _names(text: str) -> tuple[str, ...]:
    return sampler_names([name.strip() for name in text.split(";")])


def _letters(text: str) -> tuple[str, ...]:
    return sampler_names(text)


def _bias(text: str) -> tuple[int, float]:
    found = re.fullmatch(r"(\d+)([+-].+)", text)
    if not found:
        raise ValueError(f"{text!r} is not a token and a bias such as 15043+1 or 15043-0.5")
    return int(found[1]), number(found[2])


def sampling_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of create_completion and create_chat_completion that were given.

    ``max_tokens`` is always included: as in llama.cpp, an answer ends at the end token or when the context is full.
    """
    given = {parameter.keyword: getattr(args, _dest(parameter)) for parameter in NUMBERS if parameter.options}
    found = {keyword: value for keyword, value in given.items() if value is not None and keyword in KEYWORDS}
    if args.reverse_prompt is not None:
        found["stop"] = [unescaped(args, text) for text in args.reverse_prompt]
    if args.dry_sequence_breaker:
        texts = [unescaped(args, text) for text in args.dry_sequence_breaker if text != "none"]
        found["dry_sequence_breakers"] = texts
    if (samplers := one(args, "samplers", "sampler_seq")) is not None:
        found["samplers"] = samplers
    if args.logit_bias:
        found["logit_bias"] = dict(args.logit_bias)
    if (grammar := wanted_grammar(args)) is not None:
        found["grammar"] = grammar
    return found | {"max_tokens": args.predict}


def template_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of create_chat_completion from the options of ``add_template_options``."""
    if args.jinja is False:
        raise ValueError("--no-jinja: templates are always Jinja; --chat-template takes a format by name")
    found: dict[str, Any] = {"chat_template_kwargs": args.chat_template_kwargs} if args.chat_template_kwargs else {}
    if args.parse_special:
        found["parse_special"] = True
    if args.reasoning_effort not in (None, "default"):
        variables = found.get("chat_template_kwargs", {})
        found["chat_template_kwargs"] = {"reasoning_effort": args.reasoning_effort} | variables
    return found if args.reasoning is None else found | {"enable_thinking": args.reasoning}


def wanted_grammar(args: argparse.Namespace) -> "LlamaGrammar | None":
    """Return the grammar of the answer; None for no constraint."""
    names = ("grammar", "grammar_file", "json_schema", "json_schema_file")
    if (text := one(args, *names)) is None:
        return None
    from pylongctx.completions.grammar import LlamaGrammar

    name = next(name for name in names if getattr(args, name) is not None)
    make = LlamaGrammar.from_string if name in names[:2] else LlamaGrammar.from_json_schema
    try:
        return make(text)
    except ValueError as reason:
        raise ValueError(f"--{name.replace('_', '-')}: {reason}") from reason


# ---- drafts ----

NONE, MODEL, MTP, SELF = "none", "draft-simple", "draft-mtp", "longheads"
NGRAMS = {"ngram-simple": False, "ngram-map-k": False, "ngram-map-k4v": True}  # whether the most common one is drafted
MOD, CACHE = "ngram-mod", "ngram-cache"
KNOWN = (NONE, *NGRAMS, MOD, CACHE, MODEL, MTP, SELF)
MISSING = {
    "draft-eagle3": "Eagle heads are not evaluated; use ngram-simple or -md",
    "draft-dflash": "DFlash models are not evaluated; use ngram-simple or -md",
    "draft-dspark": "DSpark models are not evaluated; use ngram-simple or -md",
}
SIZES = {"size_n": "size-n", "size_m": "size-m", "min_hits": "min-hits"}
MOD_SIZES = {name: f"spec_ngram_mod_{name}" for name in ("n_match", "n_max", "n_min")}
DRAFT_NUMBERS = {"n_max": "spec_draft_n_max", "n_min": "spec_draft_n_min", "p_min": "spec_draft_p_min"}
DRAFT_ARGUMENTS = {  # arguments of Llama for the draft model
    "n_threads": "spec_draft_threads",
    "n_threads_batch": "spec_draft_threads_batch",
    "type_k": "spec_draft_type_k",
    "type_v": "spec_draft_type_v",
    "n_gpu_layers": "spec_draft_ngl",
}


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    """Add the options, see ``draft_model``."""
    options = Options(parser, "drafts")
    add = options.add
    known = ", ".join(KNOWN)
    help = f"kinds of drafts, verified by the model: {known}, or several in order (none)"
    add("--spec-type", parse=kinds, metavar="KIND,...", env=True, help=help)
    help = f"draft model: a smaller model of the same family, by file or name; same as --spec-type {MODEL}"
    add("-md", "--spec-draft-model", "--model-draft", metavar="FILE", env=True, help=help)
    add("--spec-draft-n-max", parse=integer, env=True, help=f"maximum tokens of a draft of -md or {MTP} (3)")
    add("--spec-draft-n-min", parse=integer, env=True, help=f"shorter drafts of -md or {MTP} are not used (0)")
    help = f"probability below which a draft of -md or {MTP} ends (0)"
    add("--spec-draft-p-min", "--draft-p-min", parse=number, metavar="P", env=True, help=help)
    add("--spec-draft-threads", "-td", "--threads-draft", parse=integer, help="threads of the draft model (-t)")
    help = "threads of the draft model for prompts (-td)"
    add("--spec-draft-threads-batch", "-tbd", "--threads-batch-draft", parse=integer, help=help)
    for letter in "kv":
        names = (f"--spec-draft-type-{letter}", f"-ct{letter}d", f"--cache-type-{letter}-draft")
        env = f"LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_{letter.upper()}"
        add(*names, metavar="TYPE", env=env, help=f"type of {letter.upper()} of the draft model (f16)")
    env, help = "LLAMA_ARG_N_GPU_LAYERS_DRAFT", "layers of the draft model on devices (0)"
    add("--spec-draft-ngl", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", parse=layers, env=env, help=help)
    for kind in NGRAMS:
        add(f"--spec-{kind}-size-n", parse=integer, help=f"{kind}: tokens that must be equal (12)")
        add(f"--spec-{kind}-size-m", parse=integer, help=f"{kind}: maximum tokens of a draft (48)")
        add(f"--spec-{kind}-min-hits", parse=integer, help=f"{kind}: minimum earlier occurrences (1)")
    add("--spec-ngram-mod-n-match", parse=integer, help=f"{MOD}: tokens that must be equal (24)")
    add("--spec-ngram-mod-n-max", parse=integer, help=f"{MOD}: maximum tokens of a draft (64)")
    add("--spec-ngram-mod-n-min", parse=integer, help=f"{MOD}: tokens that must be known to follow (48)")
    options.switch("--spec-default", help=f"same as --spec-type {MOD}, after other kinds")


def kinds(text: str) -> list[str]:
    """Return the kinds of drafts in a list, without ``none``."""
    found = [word.strip() for word in text.split(",")]
    for kind in found:
        if kind in MISSING:
            raise ValueError(f"{kind} is not supported: {MISSING[kind]}")
        if kind not in KNOWN:
            raise ValueError(f"unknown kind of drafts {kind!r}; available: {', '.join(KNOWN)}")
    return [kind for kind in dict.fromkeys(found) if kind != NONE]


def own_draft(args: argparse.Namespace) -> dict[str, Any]:
    """Return the argument of Llama by which the model drafts itself; it comes after other kinds."""
    wanted = [kind for kind in args.spec_type or () if kind != NONE]
    own = [kind for kind in wanted if kind in (MTP, SELF)]
    if len(own) > 1:
        raise ValueError(f"--spec-type: the model drafts itself in one way, {MTP} or {SELF}, not both")
    if own and wanted[-1] != own[0]:
        raise ValueError(f"--spec-type: {own[0]} comes after other kinds, not before {wanted[-1]}")
    if own == [MTP]:
        from pylongctx.drafts.model import MtpDraft

        return {"draft": MtpDraft(**_given(args, DRAFT_NUMBERS))}
    return {"draft": SELF} if own else {}


def draft_model(args: argparse.Namespace, given: Mapping[str, Any], n_seq: int = 1) -> "LlamaDraftModel | None":
    """Return the source of drafts for a model, or None; a draft model has the context and threads in ``given``."""
    from pylongctx.drafts.speculative import DraftChain

    wanted = list(args.spec_type or ())
    if args.spec_default and MOD not in wanted:
        wanted.append(MOD)
    if args.spec_draft_model and MTP in wanted and MODEL not in wanted:
        raise ValueError(f"{MTP} uses the block in the file of the model: leave out -md, or add {MODEL}")
    if args.spec_draft_model and MODEL not in wanted:
        wanted.append(MODEL)
    if MODEL in wanted and not args.spec_draft_model:
        raise ValueError(f"--spec-type {MODEL} needs a draft model: add -md FILE")
    names = [*(() if MTP in wanted else DRAFT_NUMBERS.values()), *DRAFT_ARGUMENTS.values()]
    unused = [name for name in names if getattr(args, name) is not None]
    if unused and MODEL not in wanted:
        raise ValueError(f"--{unused[0].replace('_', '-')} is for a draft model: add -md FILE")
    others = [kind for kind in wanted if kind not in (MTP, SELF)]
    models = [_model(args, given, n_seq) if kind == MODEL else _ngram(args, kind) for kind in others]
    return models[0] if len(models) == 1 else DraftChain(models) if models else None


def _given(args: argparse.Namespace, names: Mapping[str, str]) -> dict[str, Any]:
    return {keyword: value for keyword, name in names.items() if (value := getattr(args, name)) is not None}


def _ngram(args: argparse.Namespace, kind: str) -> "LlamaDraftModel":
    from pylongctx.drafts.ngrams import NgramCacheDraft, NgramDraft, NgramModDraft

    if kind == MOD:
        return NgramModDraft(**_given(args, MOD_SIZES))
    if kind == CACHE:
        return NgramCacheDraft()
    sizes = {keyword: f"spec_{kind}_{name}".replace("-", "_") for keyword, name in SIZES.items()}
    return NgramDraft(**_given(args, sizes), most_common=NGRAMS[kind])


def _model(args: argparse.Namespace, given: Mapping[str, Any], n_seq: int) -> "LlamaDraftModel":
    from pylongctx.drafts.model import ModelDraft
    from pylongctx.llama import Llama

    shared = {name: given[name] for name in ("n_ctx", "n_threads", "n_threads_batch", "verbose") if name in given}
    options = shared | _given(args, DRAFT_ARGUMENTS)
    llm = Llama(fetched(str(args.spec_draft_model)), **options, n_parallel=n_seq)
    try:
        return ModelDraft(llm, **_given(args, DRAFT_NUMBERS))
    except BaseException:
        llm.close()
        raise
