"""Products of linear layers: ops in place of torch's, and what is known of the kernels behind them."""
