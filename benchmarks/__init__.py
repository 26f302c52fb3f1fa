"""The workloads that ampopt is measured on, and the programs that measure them."""
