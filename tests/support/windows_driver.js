// Runs a job on the library for Windows by its C API: node windows_driver.js JOB RESULT. See tests/windows.py.
'use strict';
const fs = require('fs');
const koffi = require('koffi');

const [job, result] = process.argv.slice(2);
const { library, model: file, fields, sizes, method, batches, n_vocab } = JSON.parse(fs.readFileSync(job, 'utf8'));
const lib = koffi.load(library);
const lctx = {};
for (const declaration of [
    'int lctx_abi_version()',
    'void lctx_log_set_level(int level)',
    'void lctx_model_params_default(uint8_t * params)',
    'void * lctx_model_load(const char * path, const uint8_t * params, const char * overrides)',
    'const char * lctx_model_error(void * model)',
    'void lctx_model_free(void * model)',
    'void lctx_context_params_default(uint8_t * params)',
    'void * lctx_context_create(void * model, const uint8_t * params, const char * method)',
    'const char * lctx_context_error(void * context)',
    'const char * lctx_context_method(void * context)',
    'int lctx_decode(void * context, const int32_t * tokens, int n, int pos, float * logits, int all)',
    'int lctx_n_past(void * context, int seq)',
    'void lctx_context_free(void * context)',
]) {
    lctx[/lctx_\w+/.exec(declaration)[0]] = lib.func(declaration);
}

function check(error) {
    if (error) {
        throw new Error(error);
    }
}

lctx.lctx_log_set_level(1);
const model_params = Buffer.alloc(sizes.model);
lctx.lctx_model_params_default(model_params);
const model = lctx.lctx_model_load(file, model_params, null);
check(lctx.lctx_model_error(model));
const context_params = Buffer.alloc(sizes.context);
lctx.lctx_context_params_default(context_params);
for (const [offset, value] of fields) {
    context_params.writeInt32LE(value, offset);
}
const context = lctx.lctx_context_create(model, context_params, method);
check(lctx.lctx_context_error(context));

const logits = new Float32Array(n_vocab), parts = [];
let pos = 0;
for (const tokens of batches) {
    const status = lctx.lctx_decode(context, Int32Array.from(tokens), tokens.length, pos, logits, 0);
    if (status !== 0) {
        throw new Error(`status ${status}: ${lctx.lctx_context_error(context)}`);
    }
    pos += tokens.length;
    parts.push(Buffer.from(logits.buffer.slice(0)));
}
const said = { abi: lctx.lctx_abi_version(), method: lctx.lctx_context_method(context), n_past: lctx.lctx_n_past(context, 0) };
lctx.lctx_context_free(context);
lctx.lctx_model_free(model);
fs.writeFileSync(result + '.bin', Buffer.concat(parts));
fs.writeFileSync(result + '.json', JSON.stringify(said));
