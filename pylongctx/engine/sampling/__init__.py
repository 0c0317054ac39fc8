"""Sampling: its parameters, the sampler chain, and the tokens that a grammar or a JSON schema allows next."""
