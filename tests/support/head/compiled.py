"""Runs alone: compiles the head's kernels for a GPU that is not there, and writes what a thread keeps outside registers, in
bytes, and whether its bfloat16 is rounded to nearest.

python -m tests.support.head.compiled
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gspo.model.logprobs import kernels

HOPPER: Final = GPUTarget("cuda", 90, 32)
TYPES: Final = {"targets": "*i64", "vocabulary": "i32", "softcap": "fp32"}
TOOL: Final = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compiled(kernel: Any, *, logits: str, flag: bool) -> str:
    """``flag``: with soft-capped logits, and with entropies."""
    signature = {
        name: "constexpr" if name.isupper() else logits if name == "logits" else TYPES.get(name, "*fp32")
        for name in kernel.arg_names
    }
    constants = {"CAPPED": flag, "ENTROPY": flag, "BLOCK": kernels.BLOCK}
    done = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants), target=HOPPER, options=kernels.OPTIONS
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        told = subprocess.run([TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    spilled, rounds = re.findall(r"STACK:(\d+)", told)[0], "cvt.rn.bf16" in done.asm["ptx"]
    return f"{kernel.__name__} {spilled}{' rounds' if rounds else ''}"


def main() -> None:
    for kernel in (kernels._sums, kernels._slopes):
        for logits, flag in (("*bf16", False), ("*fp32", True)):
            print(compiled(kernel, logits=logits, flag=flag))


if __name__ == "__main__":
    main()
