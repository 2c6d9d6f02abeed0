"""Run a program with its captures, for the manager and for torch.compile."""
