"""Groups of ranks over ``paddle.distributed``."""
