"""Private APIs of torch, Triton and transformers, each behind a name that says what it is for.

`docs/private_apis.md` says what replaces each; `tests/_torch/test_private_apis.py` checks their signatures.
Import modules one by one: `inductor`, `transformers` and `triton` load what they are named after.
"""
