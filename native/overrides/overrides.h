// Reads what a caller puts in the place of a file's metadata, and of llama.cpp's choice of memory for tensors.
#pragma once

#include "llama.h"

#include <list>
#include <string>
#include <vector>

class lctx_overrides {
  public:
    // json: as for lctx_model_load; devices: of servers, in addition to those of this machine. Throws lctx_refusal,
    // naming what is wrong.
    void read(const std::string & json, std::vector<ggml_backend_dev_t> devices);

    // Throw lctx_refusal when llama.cpp, by what it said while it loaded, used a value not, or not of its type.
    void check_used(const std::string & said, bool vocab_only) const;

    // Point params at these overrides, which must outlive the model.
    void apply(llama_model_params & params) const;

  private:
    std::vector<llama_model_kv_override> metadata_;  // an empty key ends them
    std::list<std::string> patterns_;
    std::vector<llama_model_tensor_buft_override> tensors_;  // a pattern of nullptr ends them
};
