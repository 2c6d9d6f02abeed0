"""What operations with several kernels (`attention`, `products`) share: classes of calls, their comparison by
accuracy and time, the choice, what users pin, and what is kept of it on disk.
"""
