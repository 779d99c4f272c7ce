"""What is measured about the kernels: compiled for Hopper without a GPU, and run on one."""
