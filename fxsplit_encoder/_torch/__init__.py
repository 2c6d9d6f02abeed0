"""Private APIs of torch, Triton and transformers, each behind a name that says what it is for.

Nothing else in this library reaches for one. Each module states why no public API will do;
`tests/_torch/test_private_apis.py` checks that every one is there and takes what it is given, and
`docs/private_apis.md` says what it is used for, what replaces it, and on which versions it was checked.

Modules are imported one by one: `inductor`, `transformers` and `triton` load what they are named after.
"""
