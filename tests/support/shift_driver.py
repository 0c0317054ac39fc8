"""Steps on sequences of llama_cpp's own KV cache, which rotates keys again: python shift_driver.py MODEL STEPS OUT.

STEPS is JSON: ["eval", seq, tokens], ["rm", seq, first, end], ["add", seq, first, end, shift] or
["cp", from, to, first, end].
OUT gets the logits after the last token, float32 [n_vocab].
"""

import json
import sys

import llama_cpp as api
import numpy as np

model_path, steps, out = sys.argv[1:]
api.llama_backend_init()
model = api.llama_model_load_from_file(model_path.encode(), api.llama_model_default_params())
params = api.llama_context_default_params()
params.n_ctx, params.n_seq_max, params.kv_unified = 1024, 2, True
params.type_k = params.type_v = 0  # f32
params.flash_attn_type = 0  # whose sums are rounded otherwise
params.n_threads = params.n_threads_batch = 1
context = api.llama_init_from_model(model, params)
memory = api.llama_get_memory(context)
n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))


def evaluate(seq, tokens):
    first = api.llama_memory_seq_pos_max(memory, seq) + 1
    batch = api.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, first + i, 1, seq
        batch.logits[i] = i == len(tokens) - 1
    assert api.llama_decode(context, batch) == 0
    return np.ctypeslib.as_array(api.llama_get_logits(context), (n_vocab,)).copy()


calls = {
    "eval": evaluate,
    "rm": lambda seq, first, end: api.llama_memory_seq_rm(memory, seq, first, end),
    "add": lambda seq, first, end, shift: api.llama_memory_seq_add(memory, seq, first, end, shift),
    "cp": lambda source, to, first, end: api.llama_memory_seq_cp(memory, source, to, first, end),
}
for name, *arguments in json.loads(steps):
    found = calls[name](*arguments)
np.save(out, found)
