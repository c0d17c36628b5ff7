"""Decode attention over KV pages in place, for CPU ranks. Arguments are addresses and element counts."""

class PagedDecode:
    """Fixed geometry and threads; used by one thread."""
    def __init__(self, dtype: str, *, num_heads: int, num_kv_heads: int, page_size: int, dim: int, scale: float,
                 threads: int) -> None:
        """dtype: float32 or bfloat16. scale: of q . k. Raises ValueError for a geometry that cannot be."""
    def run(self, q: int, q_stride: int, out: int, pages: int, table: int, table_stride: int, kv_len: int,
            rows: int) -> None:
        """out[r] = attention of q[r] over the kv_len[r] tokens in the pages that table[r] names.

        q: `[rows][q_stride]`, num_heads * dim elements used. out: `[rows][num_heads * dim]`. pages: the layer's first page,
        `[page][head][K, V][slot][dim]`. table: int64 `[rows][table_stride]`. kv_len: int64 `[rows]`, each >= 1.
        """
