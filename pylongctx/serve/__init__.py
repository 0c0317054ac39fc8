"""An OpenAI-compatible server: one model, several sequences decoded in common batches."""
