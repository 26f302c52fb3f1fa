"""The program that passes transform, and the interface of passes."""
