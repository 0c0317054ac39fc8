"""What ``pylongctx bench`` is made of: tests, workers, records and their formats, models of random weights."""
