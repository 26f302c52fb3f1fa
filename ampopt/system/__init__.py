"""Operating system and hardware: files, caches, threads, flags, the CUDA driver, native code."""
