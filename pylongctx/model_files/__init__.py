"""Files of models: checked before llama.cpp reads them, digested for the identity of KV entries."""
