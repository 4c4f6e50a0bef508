"""The host side: compiled host functions run unchanged on a stand-in for the CUDA runtime."""
