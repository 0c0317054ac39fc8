"""Memory of a model before it is opened: what it takes on each device, what fits, and what to change if it does not."""
