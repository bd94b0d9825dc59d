"""The problem of which other libraries' numbers are known.

X[t, u, v] = 2 sin(1 + 3t + 5u + 7v), T = 5, U = 3, V = 6, labels [1, 3, 2], blank 0; a gradient is summed up as
check(g) = sum of g[t, u, v] cos(1 + t + 2u + 3v).
"""

import numpy as np

T, U, V = 5, 3, 6
t, u, v = np.ogrid[:T, : U + 1, :V]
X = 2 * np.sin(1 + 3 * t + 5 * u + 7 * v)
WEIGHTS = np.cos(1 + t + 2 * u + 3 * v)
LABELS, BLANK_AMONG_LABELS = np.array([1, 3, 2], np.int32), np.array([1, 0, 2], np.int32)
LENGTHS = np.int32(T), np.int32(U)
