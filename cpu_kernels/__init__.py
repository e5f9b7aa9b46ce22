"""Kernels for the CPU in C++: products with packed weights, attention over a paged cache.

The library is optional: installing the package on a machine with a C++ compiler builds it. It knows tensors and sizes,
but no models.
"""
