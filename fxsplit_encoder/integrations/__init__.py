"""Other libraries' models, served by captures in place; and what is done alike with all that serves.

Every package here is imported by itself: what one of them needs takes seconds that the others need not pay.
"""
