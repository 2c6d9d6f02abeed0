"""The `encoder-cg` command: one module a verb, over the public surface of the library."""
