"""The training loop: Muon for matrices and AdamW for the rest, checkpoints, a log of JSON lines."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from random_model import Shape
from torch import Tensor
from torch.nn import functional

from tiny.data import STAGES, Corpus, draw_batch, stage_at
from tiny.evaluation import examination
from tiny.gguf_files import file_digest, load_weights
from tiny.model import Model

CHECKPOINT, LOG, TOKENIZER = "checkpoint.pt", "log.jsonl", "tokenizer.model"
SCHEDULES = ("trapezoid", "cosine")
WARMUP = 0.02
TRIALS = 8  # texts, and questions at each depth, of an evaluation
CLIP = 1.0  # largest norm of a gradient


@dataclass(frozen=True)
class Settings:
    """What decides a run's result; a run goes on only with the settings that it began with.

    Attributes
    ----------
    batch_tokens : int
        Tokens of a step, whatever the length of its rows; early stages take a part of them.
    muon_lr, adam_lr : float
        Of hidden matrices; of embedding, norms and biases.
    decay : float
        Share of the steps over which the schedule "trapezoid" goes down to 0.
    bf16 : bool
        Whether matrices are multiplied in bf16; weights are f32 in any case.
    """

    arch: str = "llama"
    shape: Shape = field(default_factory=lambda: Shape(4096, 256, 4, 8, 4, 768, 512, key_length=64))
    steps: int = 2700
    batch_tokens: int = 8192
    seed: int = 0
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    weight_decay: float = 0.01
    schedule: str = "trapezoid"
    decay: float = 0.5
    bf16: bool = True


def rate(settings: Settings, step: int, first: int = 0) -> float:
    """Return what the learning rates are multiplied with; they warm up from the first step."""
    progress = step / settings.steps
    warm = min(1.0, (step - first + 1) / max(1.0, WARMUP * settings.steps))
    if settings.schedule == "cosine":
        return warm * (1 + math.cos(math.pi * progress)) / 2
    return warm * min(1.0, (1 - progress) / settings.decay)


class Trainer:
    """A model on its way; what it needs to go on is in the folder ``run``.

    Parameters
    ----------
    init : Path or None
        A GGUF file: begin with its weights, at the last stage.
    trials : int
        Texts, and questions at each depth, of an evaluation.

    Raises
    ------
    ValueError
        When the folder holds a run with other settings or texts, a tokenizer or a model to begin with has other sizes.
    """

    def __init__(
        self,
        settings: Settings,
        corpus: Corpus,
        run: Path,
        device: str = "cpu",
        init: Path | None = None,
        trials: int = TRIALS,
    ) -> None:
        self.settings, self.corpus, self.run, self.device = settings, corpus, run, device
        self._identity = asdict(settings) | {"texts": corpus.digest, "init": init and file_digest(init)}
        if (n := corpus.tokenizer.get_piece_size()) != settings.shape.n_vocab:
            raise ValueError(
                f"{run / TOKENIZER} has {n} tokens, not {settings.shape.n_vocab}; remove it, or take another folder"
            )
        torch.manual_seed(settings.seed)
        self.model = Model(settings.arch, settings.shape)
        if init:
            load_weights(self.model, init)
        self.model.to(device)
        self.step = self._first = round(STAGES[-2].until * settings.steps) if init else 0
        self._optimizers = self._make_optimizers()
        self._exam = examination(corpus, settings.shape.n_ctx_train, trials)
        self._load()

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        hidden = [values for values in self.model.blk.parameters() if values.ndim == 2]
        rest = [values for values in self.model.parameters() if not any(values is one for one in hidden)]
        settings = self.settings
        return [
            torch.optim.Muon(hidden, lr=settings.muon_lr, weight_decay=settings.weight_decay),
            torch.optim.AdamW(rest, lr=settings.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    # ---- checkpoints ----

    def _load(self) -> None:
        path = self.run / CHECKPOINT
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        if other := [name for name, value in self._identity.items() if state["identity"].get(name) != value]:
            raise ValueError(f"{path} was made with other settings ({', '.join(other)}); take those, or another folder")
        self.step = state["step"]
        log = self.run / LOG  # what came after the checkpoint is done again
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(line for line in lines if json.loads(line)["step"] <= self.step))
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def save(self) -> None:
        """Write a checkpoint; the one before stays until the new one is complete."""
        path = self.run / CHECKPOINT
        part = path.with_suffix(".part")
        optimizers = [optimizer.state_dict() for optimizer in self._optimizers]
        state = {"identity": self._identity, "step": self.step}
        torch.save(state | {"model": self.model.state_dict(), "optimizers": optimizers}, part)
        part.replace(path)

    def examine(self) -> dict[str, float]:
        """Return what an evaluation finds now."""
        return self._exam.run(self.model)

    # ---- steps ----

    def advance(self) -> float:
        """Do one step and return its loss."""
        settings = self.settings
        stage = stage_at(self.step / settings.steps)
        batch = draw_batch(
            self.corpus, settings.seed, self.step, stage, settings.batch_tokens, settings.shape.n_ctx_train
        )
        loss = self._loss(*(torch.from_numpy(values).to(self.device) for values in batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for optimizer, peak in zip(self._optimizers, (settings.muon_lr, settings.adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * rate(settings, self.step, self._first)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss.item()

    def _precision(self) -> AbstractContextManager[object]:
        if not self.settings.bf16:
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, torch.bfloat16)

    def _loss(self, tokens: Tensor, weights: Tensor) -> Tensor:
        with self._precision():
            logits = self.model(tokens[:, :-1])
        weights = weights[:, 1:].flatten()
        losses = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
        return (losses * weights).sum() / weights.sum()

    def _n_tokens(self, first: int, last: int) -> int:
        stages = (stage_at(step / self.settings.steps) for step in range(first, last))
        return sum(self.settings.batch_tokens // stage.batch for stage in stages)

    def train(self, until: int, report_every: int, check_every: int) -> Iterator[dict]:
        """Go on to a step, yielding and logging records; with every check comes an evaluation and a checkpoint."""
        until = min(until, self.settings.steps)
        start, first, losses = time.monotonic(), self.step, list[float]()
        while self.step < until:
            losses.append(self.advance())
            is_check = self.step % check_every == 0 or self.step == until
            if self.step % report_every and not is_check:
                continue
            n_tokens = self._n_tokens(first, self.step)
            seconds = time.monotonic() - start
            record = {"step": self.step, "loss": round(sum(losses) / len(losses), 4)}
            left = seconds / n_tokens * self._n_tokens(self.step, self.settings.steps)
            record |= {"tokens_per_second": round(n_tokens / seconds), "minutes_left": round(left / 60, 1)}
            losses = []
            if is_check:
                record |= self.examine()
            with (self.run / LOG).open("a") as log:
                log.write(json.dumps(record) + "\n")
            if is_check:
                self.save()
            yield record
