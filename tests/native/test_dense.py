"""SelfExtend computed densely in numpy, at three times the trained length of a model that is trained."""

import numpy as np
import oracle
from cases import LOGIT_TOLERANCE
from model_oracle import Model
from test_methods import assert_same_logits, evaluate

LENGTH = 1536


class Dense(Model):
    """A llama whose attention sees all pairs of tokens at once (algorithm 1 of arXiv 2401.01325)."""

    def attention(self, x: np.ndarray, i: int, method: oracle.SelfExtend) -> np.ndarray:
        n_head, n_head_kv = self.meta["attention.head_count"], self.meta["attention.head_count_kv"]
        q, k, v = (self.linear(x, f"blk.{i}.attn_{part}").reshape(len(x), heads, -1).swapaxes(0, 1)
                   for part, heads in (("q", n_head), ("k", n_head_kv), ("v", n_head_kv)))  # fmt: skip
        out = [self.head(q[h], k[h * n_head_kv // n_head], v[h * n_head_kv // n_head], method) for h in range(n_head)]
        return self.linear(np.concatenate(out, axis=1), f"blk.{i}.attn_output")

    def head(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, method: oracle.SelfExtend) -> np.ndarray:
        p, group, window = np.arange(len(q)), method.group_size, method.neighbor_window
        far_q = oracle.rotate(q, p // group + window - window // group, self.rope)
        far = far_q @ oracle.rotate(k, p // group, self.rope).T
        near = oracle.rotate(q, p, self.rope) @ oracle.rotate(k, p, self.rope).T
        distance = p[:, None] - p
        scores = np.where(distance < window, near, far) / np.sqrt(q.shape[1])
        scores[distance < 0] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return weights @ v / weights.sum(axis=1, keepdims=True)


def test_a_trained_model_far_beyond_its_length_equals_the_formula(embedded_f32):
    tokens = np.random.default_rng(0).integers(300, 2000, LENGTH).tolist()
    method = oracle.SelfExtend(6, 128)
    want = Dense.load(embedded_f32).logits(tokens, method)
    got = evaluate(embedded_f32, method.text(), tokens, n_ctx=LENGTH, n_batch=512, n_ubatch=512)
    assert_same_logits(got, want, LOGIT_TOLERANCE)
