"""An OpenAI-compatible server: one model, several sequences that are decoded together."""
