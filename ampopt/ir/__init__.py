"""The program that passes transform, and the contract that they keep."""
