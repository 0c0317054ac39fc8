// The CPU kernels (../ops/args.h says what they take).
#pragma once

#include "../ops/args.h"

struct ggml_compute_params;

// Each kernel is called by all threads; ith/nth, work buffer and barrier come from ggml's compute params.
void lctx_cpu_angles(const ggml_compute_params * params, const lctx_angles_args & args);
void lctx_cpu_store(const ggml_compute_params * params, const lctx_store_args & args);
void lctx_cpu_attend(const ggml_compute_params * params, const lctx_attend_args & args);
void lctx_cpu_summarize(const ggml_compute_params * params, const lctx_summarize_args & args);
void lctx_cpu_select(const ggml_compute_params * params, const lctx_select_args & args);
void lctx_cpu_vote(const ggml_compute_params * params, const lctx_vote_args & args);
void lctx_cpu_evict(const ggml_compute_params * params, const lctx_evict_args & args);
void lctx_cpu_index(const ggml_compute_params * params, const lctx_index_args & args);
void lctx_cpu_fetch(const ggml_compute_params * params, const lctx_fetch_args & args);

// In which numbers *attend* multiplies the rows of a prompt, by the types of K and V: for people.
const char * lctx_cpu_prompt_products();

// Bytes of work buffer of the kernels with n_tasks threads.
size_t lctx_cpu_store_wsize(const lctx_store_args & args, int n_tasks);
size_t lctx_cpu_attend_wsize(const lctx_attend_args & args, int n_tasks);
size_t lctx_cpu_summarize_wsize(const lctx_summarize_args & args, int n_tasks);
size_t lctx_cpu_select_wsize(const lctx_select_args & args, int n_tasks);
size_t lctx_cpu_vote_wsize(const lctx_vote_args & args, int n_tasks);
size_t lctx_cpu_evict_wsize(const lctx_evict_args & args, int n_tasks);
size_t lctx_cpu_index_wsize(const lctx_index_args & args, int n_tasks);
size_t lctx_cpu_fetch_wsize(const lctx_fetch_args & args, int n_tasks);
