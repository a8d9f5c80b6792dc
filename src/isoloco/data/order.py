"""Which rows a step reads: a keyed bijection of every epoch's rows, computed and never stored."""

import hashlib
import math

import numpy as np

_ROUNDS = 8  # one 64-byte hash gives eight 64-bit round keys


class Order:
    """A shuffled order of `rows` rows for every epoch, without memory or state.

    Position i = epoch * rows + k names row sigma_epoch(k), where sigma_epoch is a bijection of range(rows): every row
    comes exactly once in an epoch, and any position is found in O(1). sigma is a Feistel network over Z_a x Z_b, with
    a * b >= rows, and cycle walking. As a * b - rows < a, about sqrt(rows), hardly any position walks.
    Source: Black and Rogaway, Ciphers with arbitrary finite domains, 2002 (generalized Feistel, cycle walking).

    rows: how many rows an epoch has, 1 to 2**62. seed: any int. Raises ValueError for other numbers of rows.
    """

    def __init__(self, rows: int, seed: int) -> None:
        if not 1 <= rows <= 2**62:
            raise ValueError(f"an order needs 1 to 2**62 rows, got {rows}: the data is shorter than one sequence")
        self.rows = rows
        self.seed = seed
        self._a = math.isqrt(rows - 1) + 1  # the square root, rounded up
        self._b = -(-rows // self._a)

    def row(self, position: int) -> int:
        """The row at a global position (0, 1, ...)."""
        return int(self.take(position, position + 1)[0])

    def take(self, start: int, stop: int) -> np.ndarray:
        """Rows at positions start to stop - 1, int64 [stop - start]; the range may span epochs."""
        if not 0 <= start <= stop:
            raise ValueError(f"positions go from 0 upwards and start <= stop, got {start} to {stop}")
        parts = []
        while start < stop:
            epoch, first = divmod(start, self.rows)
            count = min(stop - start, self.rows - first)
            parts.append(self._permute(epoch, np.arange(first, first + count, dtype=np.uint64)))
            start += count
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)

    def _permute(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        digest = hashlib.blake2b(f"row order/{self.seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        rows = self._network(positions, keys)
        while (outside := rows >= self.rows).any():  # cycle walking: apply again until inside
            rows[outside] = self._network(rows[outside], keys)
        return rows

    def _network(self, x: np.ndarray, keys: np.ndarray) -> np.ndarray:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left, right = x // b, x % b  # left in Z_a, right in Z_b
        for key_left, key_right in zip(keys[::2], keys[1::2], strict=True):
            left = (left + _mix(right ^ key_left) % a) % a
            right = (right + _mix(left ^ key_right) % b) % b
        return left * b + right


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea, Flood, 2014), a hash of 64 bits to 64 bits; products wrap around."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
