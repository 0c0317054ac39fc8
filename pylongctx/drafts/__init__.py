"""Draft models: n-grams, lookup in the prompt, another model, the MTP block of the model, and the model itself."""
