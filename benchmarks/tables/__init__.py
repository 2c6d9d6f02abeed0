"""The tables of the benchmarks: a module for each script, which knows only its own rows."""
