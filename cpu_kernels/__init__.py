"""Kernels for the CPU in C++: products with packed weights, attention over a paged cache.

The library is optional. It is built when the package is installed on a machine with a C++ compiler. It knows tensors
and sizes, and nothing of models.
"""
