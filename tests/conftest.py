"""One thread for NumPy's products: the oracle's are small, and idle threads spin."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
