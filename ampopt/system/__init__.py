"""What lies below us: files, caches, threads, flags, the driver, native code."""
