"""Train a tiny model that retrieves, and write it as GGUF.

    python training/train_tiny.py texts/ run/

``texts/``: any folder of plain text. Into ``run/`` go the tokenizer, checkpoints, a log and, at the end,
``model-f32.gguf`` and ``model-q8_0.gguf`` (below 6 MB). The same command again goes on where it stopped;
``--until`` stops it early. The same seed, machine and number of threads give the same model.

2700 steps are 16 M tokens: an hour on two idle cores (AMD EPYC, Zen 5; bf16).
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

try:
    import torch
except ImportError as reason:
    raise ImportError("training needs torch: pip install pylongctx[train]") from reason

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))  # random_model

from tiny.data import load_corpus
from tiny.export import WEIGHTS, export
from tiny.gguf_files import read_tokenizer
from tiny.model import BIASED
from tiny.tokenizer import load_tokenizer
from tiny.train import CHECKPOINT, SCHEDULES, TOKENIZER, TRIALS, Settings, Trainer

MHA_HEADS = 6  # of a llama: as many weights as 8 query heads that share 4 key heads
DEFAULT = Settings()


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("texts", type=Path, help="a text file, or a folder of .txt files")
    add("run", type=Path, help="folder of the run; made if it is not there")
    add("--held-out", type=Path, help="text to measure on; default: the last fiftieth of every training text")
    add("--init", type=Path, help="GGUF file: begin with its weights, and with the last stage of training")
    add("--arch", choices=BIASED, default=DEFAULT.arch)
    add("--mha", action="store_true", help="as many key heads as query heads")
    add("--layers", type=int, default=DEFAULT.shape.n_layer)
    add("--width", type=int, default=DEFAULT.shape.n_embd)
    add("--feed-forward", type=int, default=DEFAULT.shape.n_ff)
    add("--vocabulary", type=int, default=DEFAULT.shape.n_vocab)
    add("--context", type=int, default=DEFAULT.shape.n_ctx_train)
    add("--steps", type=int, default=DEFAULT.steps)
    add("--until", type=int, help="stop after this step of --steps")
    add("--examine", type=int, metavar="N", help="train nothing: measure the model on N texts and questions per depth")
    add("--batch-tokens", type=int, default=DEFAULT.batch_tokens)
    add("--seed", type=int, default=DEFAULT.seed)
    add("--muon-lr", type=float, default=DEFAULT.muon_lr)
    add("--adam-lr", type=float, default=DEFAULT.adam_lr)
    add("--weight-decay", type=float, default=DEFAULT.weight_decay)
    add("--schedule", choices=SCHEDULES, default=DEFAULT.schedule)
    add("--decay", type=float, default=DEFAULT.decay, help="share of the steps over which a trapezoid goes down")
    add("--f32", action="store_true", help="multiply matrices in f32 instead of bf16")
    add("--device", default="cpu", help="cpu or cuda")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--report-every", type=int, default=10, help="steps")
    add("--check-every", type=int, default=200, help="steps between evaluations and checkpoints")
    return parser.parse_args(argv)


def settings_of(args: argparse.Namespace) -> Settings:
    shape = replace(
        DEFAULT.shape,
        n_vocab=args.vocabulary,
        n_embd=args.width,
        n_layer=args.layers,
        n_ff=args.feed_forward,
        n_ctx_train=args.context,
    )
    if args.arch == "qwen2":  # its heads must be as wide as the embedding
        shape = replace(shape, n_head=args.width // shape.head_dim, n_head_kv=max(1, args.width // shape.head_dim // 2))
    elif args.mha:
        shape = replace(shape, n_head=MHA_HEADS)
    if args.mha:
        shape = replace(shape, n_head_kv=shape.n_head)
    names = "arch steps batch_tokens seed muon_lr adam_lr weight_decay schedule decay".split()
    return Settings(shape=shape, bf16=not args.f32, **{name: getattr(args, name) for name in names})


def line(record: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in record.items())


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    args.run.mkdir(parents=True, exist_ok=True)
    tokenizer = args.run / TOKENIZER
    if args.init:
        if not tokenizer.exists():
            tokenizer.write_bytes(read_tokenizer(args.init))
        args.vocabulary = load_tokenizer(tokenizer).get_piece_size()
    settings = settings_of(args)
    corpus = load_corpus(args.texts, args.held_out, tokenizer, args.vocabulary)
    only_measure = args.examine is not None
    if only_measure and not (args.init or (args.run / CHECKPOINT).exists()):
        raise ValueError(f"there is no model to measure: {args.run} holds no {CHECKPOINT}, and --init names no file")
    trainer = Trainer(settings, corpus, args.run, args.device, args.init, args.examine if only_measure else TRIALS)
    n_weights = sum(values.numel() for values in trainer.model.parameters())
    print(f"{n_weights} weights, {len(corpus.tokens)} tokens of text", flush=True)
    if only_measure:
        print(line(trainer.examine()))
        return
    for record in trainer.train(args.until or settings.steps, args.report_every, args.check_every):
        print(line(record), flush=True)
    for weights in WEIGHTS:
        print(export(args.run / f"model-{weights}.gguf", trainer.model, corpus.tokenizer, weights))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"train_tiny: {error}")
