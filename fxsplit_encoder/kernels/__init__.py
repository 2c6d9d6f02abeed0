"""What operations with several kernels (`attention`, `products`) share: classes of calls, their comparison by
accuracy and time, the choice, and what is kept of it on disk.
"""
