"""The kernels and combinations of choices that stand for all."""
