"""A kernel that tells where it ran. Imported only where there is a GPU."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def where(OUT, turns):
    """Each program is busy for a while and stores the number of its multiprocessor."""
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    x = sm.to(tl.float32)
    for _ in range(turns):
        x = x * 1.0001 + 0.5
    tl.store(OUT + tl.program_id(0), tl.where(x == -1.0, -2, sm))
