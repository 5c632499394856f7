"""Training and evaluation of the embedded default checkpoint (``hal/model/default``).

Not part of any wheel. ``python -m training.train`` makes the checkpoint, ``python -m training.evaluate`` measures it.
"""
