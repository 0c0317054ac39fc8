"""Options of sampling and of chat templates."""

import argparse
import re
from typing import TYPE_CHECKING, Any

from pylongctx.cli.arguments import PREFIX, Options, file_text, integer, json_object, number, on_off_auto
from pylongctx.cli.options import one
from pylongctx.engine.sampling.params import KEYWORDS, NUMBERS, Number, sampler_names

if TYPE_CHECKING:
    from pylongctx.completions.grammar import LlamaGrammar

ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
ESCAPE = re.compile(r"""\\([nrt'"\\]|x([0-9A-Fa-f]{2}))""")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the sampling options and the limits of an answer, see ``sampling_arguments``."""
    options = Options(parser, "sampling")
    add = options.add
    add(
        "-n",
        "--predict",
        "--n-predict",
        parse=_predict,
        env="LLAMA_ARG_N_PREDICT",
        help="maximum tokens of an answer (-1: no limit)",
    )
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
    options.several(
        "-l",
        "--logit-bias",
        parse=_bias,
        metavar="TOKEN+BIAS",
        help="add a bias to the logit of a token, such as 15043+1 or 15043-1",
    )
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
    options.switch(
        "-e", "--escape", off=("--no-escape",), help="process escapes such as \\n in options (on)", dest="escape"
    )


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Add the detection of loops and the rendering of answers."""
    options = Options(parser, "answer")
    help = "stop an answer that repeats itself (on)"
    options.switch("--loop-stop", off=("--no-loop-stop",), help=help, dest="loop_stop")
    help = "render Markdown in a terminal (on)"
    options.switch("--markdown", off=("--no-markdown",), help=help, dest="markdown")


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
    add(
        "--chat-template",
        metavar="NAME|JINJA",
        env="LLAMA_ARG_CHAT_TEMPLATE",
        help="named chat format, or a Jinja template",
    )
    add(
        "--chat-template-file",
        parse=file_text,
        metavar="FILE",
        env="LLAMA_ARG_CHAT_TEMPLATE_FILE",
        help="file with a Jinja template",
    )
    add(
        "--chat-template-kwargs",
        parse=json_object,
        metavar="JSON",
        env="LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
        help="JSON object of variables for the template",
    )
    help = "accepted for compatibility: templates are always Jinja"
    options.switch("--jinja", off=("--no-jinja",), env="LLAMA_ARG_JINJA", help=help, dest="jinja")
    help = "parse special tokens in user and tool messages, as llama.cpp does"
    options.switch("--parse-special", help=help)
    options.add(
        "-rea",
        "--reasoning",
        parse=on_off_auto,
        metavar="on|off|auto",
        env="LLAMA_ARG_REASONING",
        help="let reasoning models reason (auto: yes)",
    )

    env, help = (
        "LLAMA_ARG_REASONING_EFFORT",
        "reasoning effort, for templates that support it: low, medium, high (theirs)",
    )
    add("--reasoning-effort", metavar="LEVEL", env=env, help=help)


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
