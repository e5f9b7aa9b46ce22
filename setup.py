"""The kernels for the CPU, once for each kind of processor. pyproject.toml has everything else.

Where there is no compiler, or where it does not know the processor, the library is left out.
"""

from pathlib import Path

from setuptools import Extension, setup

CSRC = Path("cpu_kernels/csrc")
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fvisibility=hidden", "-pthread"]
AVX512 = ["-march=x86-64-v4"]
AMX = [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"]
BUILDS = {"amx": AMX, "avx512": AVX512, "avx2": ["-march=x86-64-v3"], "baseline": []}

if __name__ == "__main__":
    setup(
        ext_modules=[
            Extension(
                f"raylens.cpu_kernels.{build}",
                [str(CSRC / f"{build}.cpp")],
                depends=sorted(map(str, CSRC.glob("*.h"))),
                language="c++",
                extra_compile_args=FLAGS + flags,
                extra_link_args=["-pthread"],
                optional=True,
            )
            for build, flags in BUILDS.items()
        ]
    )
