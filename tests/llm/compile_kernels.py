"""Compiles the decode kernels for GPUs of the given capabilities, which Triton can do on any machine: what its
interpreter runs may still be refused by its compiler. Run as a program: the interpreter is chosen for a whole process.

    python -m tests.llm.compile_kernels CAPABILITY...
"""

import sys
from typing import Any

from triton import compiler
from triton.backends.compiler import GPUTarget

from raylens.llm.cuda import decode_kernels

# The least capability for a float8 cache, see `llm/cache_size.py`.
FLOAT8 = 89
# Of queries and cache; key_dim, value_dim, query heads of a key head; whether there are several splits.
KINDS = [
    ("bf16", "bf16", 128, 128, 1, False),
    ("bf16", "bf16", 128, 128, 7, True),
    ("bf16", "fp8e4nv", 192, 128, 8, True),
    ("fp32", "fp32", 20, 12, 2, True),
]


def compiled(target: GPUTarget, kernel: Any, arguments: dict[str, str], constants: dict[str, Any]) -> Any:
    """`arguments`: types of those that are told at run time; the rest are 32-bit integers."""
    types = {name: arguments.get(name, "i32") for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return compiler.compile(compiler.ASTSource(fn=kernel, signature=types, constexprs=places), target=target)


def compile_for(target: GPUTarget) -> None:
    for queries, cache, key_dim, value_dim, groups, is_split in KINDS:
        if cache == "fp8e4nv" and target.arch < FLOAT8:
            continue
        results = "*fp32" if is_split else f"*{queries}"
        arguments = {"queries": f"*{queries}", "keys": f"*{cache}", "values": f"*{cache}"}
        arguments |= {"block_tables": "*i32", "lengths": "*i32", "partials": results, "sums": results}
        arguments |= {"scaling": "fp32", "softcap": "fp32"}
        sizes = {"kv_heads": 4, "groups": groups, "key_dim": key_dim, "value_dim": value_dim, "block_size": 16}
        tiles = {"tile_keys": decode_kernels._padded(key_dim), "tile_values": decode_kernels._padded(value_dim)}
        tiles |= {"tile_groups": decode_kernels._padded(groups), "tile_positions": 32}
        features = {"has_softcap": is_split, "has_window": is_split, "is_split": is_split}
        compiled(target, decode_kernels._attend_split, arguments, sizes | tiles | features)
    merging = {"value_dim": 128, "tile_splits": decode_kernels._MAX_SPLITS, "tile_values": 128}
    compiled(target, decode_kernels._merge_splits, {"partials": "*fp32", "sums": "*fp32", "output": "*bf16"}, merging)


if __name__ == "__main__":
    for capability in sys.argv[1:]:
        compile_for(GPUTarget("cuda", int(capability), 32))
