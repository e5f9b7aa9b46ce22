"""Kernels for the CPU in C++, for tensors and sizes, not models. Installing on a machine with a C++ compiler builds
them."""
