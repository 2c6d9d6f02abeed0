"""Private APIs of torch, Triton and transformers, each behind a function named after its purpose.

`docs/private_apis.md` says what replaces each; `tests/_torch/test_private_apis.py` checks their signatures.
Import modules one by one: `inductor`, `transformers` and `triton` load what they are named after.
"""
