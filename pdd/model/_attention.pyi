"""Attention over paged KV, on addresses. The caller keeps the memory alive and of the stated geometry."""

class DecodeAttention:
    """Owner: one thread. `plan` once per step, then `run` once per layer."""

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, num_pages: int, bf16: bool,
                 threads: int, tiles: int = 2, value_dim: int = 0, scale: float = 0.0, instruction_set: str = "") -> None:
        """tiles: of a KV head: K and V; or 1, whose rows are keys and begin with their values, `value_dim` wide. value_dim
        0: head_dim. scale: of the scores, 0: head_dim ** -0.5. instruction_set: "" for the best of this CPU. Raises
        ValueError when a dim is no multiple of 16, heads do not form whole groups, or the CPU lacks the instructions."""
    def plan(self, tables: int, kv_lens: int, num_rows: int, width: int) -> None:
        """Copies int64 `[num_rows, width]` page numbers and `[num_rows]` lengths. Raises IndexError for a page that the
        region does not have; then nothing can be run."""
    def run(self, layer: int, q: int, q_stride: int, out: int, window: int = 0) -> None:
        """layer: the layer's pages `[pages, kv_heads, tiles, page_size, head_dim]`. q: rows `q_stride` values apart.
        out: `[num_rows, num_heads, value_dim]`. window: the last tokens that are attended to; 0: all."""
    @property
    def instruction_set(self) -> str:
        """The kernel in use: "x86-64-v4", "x86-64-v3" or "base"."""

class ChunkAttention:
    """Of prefill chunks, bf16. Owner: one thread."""

    @staticmethod
    def supported() -> bool:
        """Whether this CPU has what the kernel needs (AVX512_BF16)."""
    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, num_pages: int,
                 threads: int) -> None:
        """Raises ValueError when head_dim is no multiple of 32, heads do not form whole groups, or the CPU lacks it."""
    def run(self, layer: int, table: int, num_table: int, start: int, qo_len: int, q: int, q_stride: int,
            out: int, window: int = 0) -> None:
        """Queries at positions [start, start + qo_len), each over the keys up to its own position.

        layer: the layer's pages `[pages, kv_heads, 2, page_size, head_dim]`. table: int64 `[num_table]` page numbers.
        q: rows `[num_heads, head_dim]`, `q_stride` values apart. out: `[qo_len, num_heads, head_dim]`. window: tokens that
        a query sees, its own included; 0: all. Raises IndexError for a page that the region does not have, or too few of
        them."""
