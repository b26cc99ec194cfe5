"""The same computations as Triton kernels, for float32 on a GPU; imported only with Triton."""
