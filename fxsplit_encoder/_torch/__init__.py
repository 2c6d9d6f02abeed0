"""Private APIs of torch, Triton and transformers, each behind a name that says what it is for.

Nothing else in this library uses one. `docs/private_apis.md` says what each is for and what replaces it;
`tests/_torch/test_private_apis.py` checks that it is there and takes what it is given. Import modules one by
one: `inductor`, `transformers` and `triton` load what they are named after.
"""
