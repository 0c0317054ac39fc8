"""The parts of ``pylongctx bench``: tests, workers, records and their formats, models with random weights."""
