"""Options of speculative decoding, spelled as llama.cpp spells them."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pylongctx.cli.arguments import Options, integer, layers, number
from pylongctx.cli.get import fetched

if TYPE_CHECKING:
    from pylongctx.drafts.speculative import LlamaDraftModel

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
NUMBERS = {"n_max": "spec_draft_n_max", "n_min": "spec_draft_n_min", "p_min": "spec_draft_p_min"}
OPENED = {  # arguments of Llama for the draft model
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
    add("--spec-type", parse=kinds, metavar="KIND,...", env="LLAMA_ARG_SPEC_TYPE", help=help)
    help = f"draft model: a smaller model of the same family, by file or name; same as --spec-type {MODEL}"
    env = "LLAMA_ARG_SPEC_DRAFT_MODEL"
    add("-md", "--spec-draft-model", "--model-draft", metavar="FILE", env=env, help=help)
    env = "LLAMA_ARG_SPEC_DRAFT_N_MAX"
    add("--spec-draft-n-max", parse=integer, env=env, help=f"maximum tokens of a draft of -md or {MTP} (3)")
    env, help = "LLAMA_ARG_SPEC_DRAFT_N_MIN", f"shorter drafts of -md or {MTP} are not used (0)"
    add("--spec-draft-n-min", parse=integer, env=env, help=help)
    env, help = "LLAMA_ARG_SPEC_DRAFT_P_MIN", f"probability below which a draft of -md or {MTP} ends (0)"
    add("--spec-draft-p-min", "--draft-p-min", parse=number, metavar="P", env=env, help=help)
    add("--spec-draft-threads", "-td", "--threads-draft", parse=integer, help="threads of the draft model (-t)")
    help = "threads of the draft model for prompts (-td)"
    add("--spec-draft-threads-batch", "-tbd", "--threads-batch-draft", parse=integer, help=help)
    for letter in "kv":
        names = (f"--spec-draft-type-{letter}", f"-ct{letter}d", f"--cache-type-{letter}-draft")
        env, help = f"LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_{letter.upper()}", f"type of {letter.upper()} of the draft model"
        add(*names, metavar="TYPE", env=env, help=f"{help} (f16)")
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
    """Return the kinds of drafts in a list, without ``none``.

    Raises
    ------
    ValueError
        When a kind is unknown or not supported.
    """
    found = [word.strip() for word in text.split(",")]
    for kind in found:
        if kind in MISSING:
            raise ValueError(f"{kind} is not supported: {MISSING[kind]}")
        if kind not in KNOWN:
            raise ValueError(f"unknown kind of drafts {kind!r}; available: {', '.join(KNOWN)}")
    return [kind for kind in dict.fromkeys(found) if kind != NONE]


def own_draft(args: argparse.Namespace) -> dict[str, Any]:
    """Return the argument of Llama by which the model drafts itself; it comes after other kinds.

    Raises
    ------
    ValueError
        When there are two, or one of them comes before another kind.
    """
    wanted = [kind for kind in args.spec_type or () if kind != NONE]
    own = [kind for kind in wanted if kind in (MTP, SELF)]
    if len(own) > 1:
        raise ValueError(f"--spec-type: the model drafts itself in one way, {MTP} or {SELF}, not both")
    if own and wanted[-1] != own[0]:
        raise ValueError(f"--spec-type: {own[0]} comes after other kinds, not before {wanted[-1]}")
    if own == [MTP]:
        from pylongctx.drafts.mtp import MtpDraft

        return {"draft": MtpDraft(**_given(args, NUMBERS))}
    return {"draft": SELF} if own else {}


def draft_model(args: argparse.Namespace, given: Mapping[str, Any], n_seq: int = 1) -> "LlamaDraftModel | None":
    """Return the source of drafts for a model, or None.

    Parameters
    ----------
    args : argparse.Namespace
        The parsed options.
    given : Mapping
        Arguments of Llama for the model, of which its draft model has the context and the threads.
    n_seq : int
        Sequences that generate concurrently.

    Raises
    ------
    ValueError
        When options contradict each other, or the draft model is refused.
    """
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
    names = [*(() if MTP in wanted else NUMBERS.values()), *OPENED.values()]
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
    options = shared | _given(args, OPENED)
    llm = Llama(fetched(str(args.spec_draft_model)), **options, n_parallel=n_seq)
    try:
        return ModelDraft(llm, **_given(args, NUMBERS))
    except BaseException:
        llm.close()
        raise
